"""What must hold of a lane at any moment, as named functions that every property test uses again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import redis

from infra.contracts import Event, Job, Tier
from infra.keys import Lane
from infra.states import TERMINAL, Status
from infra.store import LaneLoad
from infra.work import Work, work_left


def log_is_gapless(job: Job, events: Sequence[Event]) -> None:
    """Numbers from 0 without gap or repeat, as many as the record says."""
    assert [event.sequence_number for event in events] == list(range(job.num_events))


def log_ends_once(job: Job, events: Sequence[Event]) -> None:
    """One terminal event, at the end, if and only if the job has ended, and of its kind."""
    ends = [event for event in events if event.is_last]
    if job.status in TERMINAL:
        assert ends == [events[-1]] and events[-1].type == f"job.{job.status}"
    else:
        assert ends == []


def attempts_follow_each_other(job: Job, events: Sequence[Event]) -> None:
    """Attempts start in order, each after the one before was given up; the record counts them."""
    started = [event.body.attempt for event in events if event.type == "job.started"]
    assert started == list(range(1, job.attempt + 1))
    in_attempt = False
    for event in events:
        if event.type == "job.started":
            assert not in_attempt
            in_attempt = True
        elif event.type == "job.requeued":
            assert in_attempt
            in_attempt = False
        elif event.type == "job.delta":
            assert in_attempt


def stream_holds_the_living(server: redis.Redis, lane: int, jobs: Sequence[Job]) -> None:
    """XLEN of a tier's stream is the number of its jobs that have not ended."""
    for tier in Tier:
        living = [job for job in jobs if job.tier is tier and job.status not in TERMINAL]
        assert server.xlen(Lane(lane).stream(tier)) == len(living)


def clocks_hold_the_started(server: redis.Redis, lane: int, jobs: Sequence[Job]) -> None:
    """In `due`: who runs, or was started and waits. In `waiting`: who is queued."""
    due = _members(server, Lane(lane).due)
    assert due == {job.id for job in jobs if job.status not in TERMINAL and job.attempt > 0}
    waiting = {member for tier in Tier for member in _members(server, Lane(lane).waiting(tier))}
    assert waiting == {job.id for job in jobs if job.status is Status.QUEUED}


def finished_jobs_expire(server: redis.Redis, lane: int, jobs: Sequence[Job]) -> None:
    """Records and logs have an end if and only if their job has one."""
    for job in jobs:
        for key in (Lane(lane).job(job.id), Lane(lane).events(job.id)):
            assert (server.pttl(key) > 0) == (job.status in TERMINAL), key


def work_is_that_of_the_waiting(load: LaneLoad, jobs: Sequence[Job], logs: Mapping[str, Sequence[Event]]) -> None:
    """A tier's sums are what its queued jobs cost, less what they emitted in earlier attempts."""
    for tier in Tier:
        sum_of_them = Work()
        for job in jobs:
            if job.tier is tier and job.status is Status.QUEUED:
                num_emitted = sum(len(one.token_ids) for event in logs[job.id] for one in event.body.deltas)
                sum_of_them += work_left(job.cost_tokens, job.spec.output_tokens, num_emitted)
        assert load.work[tier] == sum_of_them
    assert load.delayed <= load.num_waiting == sum(job.status is Status.QUEUED for job in jobs)
    assert load.running == sum(job.status is Status.RUNNING for job in jobs)


def _members(server: redis.Redis, key: str) -> set[str]:
    return {str(member, "utf-8") for member in cast(list[bytes], server.zrange(key, 0, -1))}
