"""Both stores do the same: a machine gives them one command after the other and compares every answer and every state.

Nothing depends on how long a step takes: leases, delays and limits are 0 or far away. The memory's clock is turned a
millisecond a step, and Redis gets at least as much, so that no two steps share a moment in either.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from infra import work
from infra.addresses import ClusterAddress
from infra.clock import ManualClock
from infra.contracts import Claim, Event, Job, JobError, Notice, Outcome, Publication, RunItem, Tier, Webhook
from infra.errors import MillstreamError
from infra.jobs import RedisJobs
from infra.memory import MemoryJobs
from infra.states import TERMINAL, Status
from infra.store import JobStore
from tests.infra import invariants
from tests.infra.conftest import operator
from tests.infra.jobs_for_tests import ALIAS, delta, new_job, success

LANE = 1
FAR = 3600.0
FAR_MS = 10**15
# Past at once, or never.
LIMITS: list[dict[str, int]] = [
    {"queue_ttl_ms": 0},
    {"deadline_ms": 1},
    {"attempt_timeout_ms": 0},
    {"queue_ttl_ms": FAR_MS, "deadline_ms": 2 * FAR_MS, "attempt_timeout_ms": FAR_MS},
]
EVENT_SETS: list[list[str]] = [[], ["job.started"], ["job.succeeded", "job.cancelled"], ["job.failed", "job.expired"]]


def timeless(value: Any) -> Any:
    """An answer without its times, which differ between the stores, and errors by kind."""
    match value:
        case Job():
            plain = msgspec.to_builtins(value)
            for name in ("created_ms", "started_ms", "finished_ms"):
                plain[name] = plain.get(name) is not None
            return plain
        case Event():
            return value.type, value.sequence_number, msgspec.to_builtins(value.body)
        case Notice():
            return value.id, value.event, value.topic, value.sequence_number, value.tries, value.webhook, value.run_item
        case Claim():
            return timeless(value.job), timeless(value.history)
        case list() | tuple():
            return [timeless(item) for item in value]
        case Exception():
            return type(value)
        case _:
            return value


class Twins(RuleBasedStateMachine):
    """One memory store and one Redis store, given the same commands."""

    def __init__(self, runner: asyncio.Runner, jobs: RedisJobs, server: redis.Redis) -> None:
        super().__init__()
        server.flushdb()
        self.runner, self.server = runner, server
        self.clock = ManualClock()
        self.memory: JobStore = MemoryJobs(clock=self.clock)
        self.redis: JobStore = jobs
        self.ids: list[str] = []
        self.claims: list[Claim] = []
        self.num_calls = 0
        self.notices: list[Notice] = []
        self.ended: dict[str, Any] = {}
        assert self.both(lambda store: store.open_lane(ALIAS)) == LANE

    def both(self, act: Callable[[JobStore], Awaitable[Any]]) -> Any:
        """Gives both the same command, at a moment of its own; returns Redis's answer, which must be the memory's."""
        self.clock.advance(ms=1)
        time.sleep(0.0011)
        return self.see(act)

    def see(self, act: Callable[[JobStore], Awaitable[Any]]) -> Any:
        """Asks both the same question; returns Redis's answer, which must be the memory's."""
        answers = [self.runner.run(self._answer(act, store)) for store in (self.memory, self.redis)]
        assert timeless(answers[0]) == timeless(answers[1])
        return answers[1]

    async def _answer(self, act: Callable[[JobStore], Awaitable[Any]], store: JobStore) -> Any:
        try:
            return await act(store)
        except MillstreamError as error:
            return error

    @rule(
        tier=st.sampled_from(Tier),
        cost_tokens=st.sampled_from([1, 10, 100]),
        wanted=st.sampled_from([None, *EVENT_SETS]),
        is_child=st.booleans(),
        limits=st.sampled_from([{}] * 8 + LIMITS),
        max_waiting=st.sampled_from([None, None, None, 3]),
        watch_ms=st.sampled_from([None, None, None, 0, FAR_MS]),
    )
    def submit(self, max_waiting: int | None, wanted: list[str] | None, is_child: bool, limits: dict[str, int],
               watch_ms: int | None = None, **fields: Any) -> None:  # fmt: skip
        job = new_job(
            LANE, f"{len(self.ids):08d}", **{**fields, **limits},
            webhook=None if wanted is None else Webhook(url="https://example.com", events=wanted),
            run_item=RunItem(run_id="run", item_id="item") if is_child else None,
        )  # fmt: skip
        job.watch_ms = watch_ms
        if isinstance(self.both(lambda store: store.submit(job, max_waiting=max_waiting)), tuple):
            self.ids.append(job.id)

    @initialize(tiers=st.lists(st.sampled_from(Tier), min_size=2, max_size=5))
    def submit_some(self, tiers: list[Tier]) -> None:
        for tier in tiers:
            self.submit(max_waiting=None, wanted=[], is_child=False, limits={}, tier=tier, cost_tokens=10)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(self.ids))
        job = new_job(LANE, job_id.split("-")[2], tier=Tier.BULK)
        self.both(lambda store: store.submit(job))

    @rule(lease_seconds=st.sampled_from([0.0, FAR]))
    def claim_any(self, lease_seconds: float) -> None:
        self.claim("a", free_tokens=None, lease_seconds=lease_seconds, alone=True)

    @rule(num=st.integers(1, 3))
    def lose_workers(self, num: int) -> None:
        for _ in range(num):
            self.claim("a", free_tokens=None, lease_seconds=0.0, alone=True)

    @rule(
        owner=st.sampled_from(["a", "b"]),
        free_tokens=st.sampled_from([None, None, 0, 5, 50]),
        lease_seconds=st.sampled_from([0.0, FAR]),
        alone=st.booleans(),
        loses_replies=st.booleans(),
    )
    def claim(self, owner: str, free_tokens: int | None, lease_seconds: float, alone: bool,
              loses_replies: bool = False) -> None:  # fmt: skip
        def call(store: JobStore) -> Awaitable[Claim | None]:
            return store.claim(
                LANE, owner, free_tokens=free_tokens, lease_seconds=lease_seconds, profile=f"w;{owner}", alone=alone,
                call=str(self.num_calls),
            )  # fmt: skip

        self.num_calls += 1
        claim = self.both(call)
        if isinstance(claim, Claim):
            self.claims.append(claim)
            if loses_replies:
                again = self.both(call)
                assert isinstance(again, Claim) and again.hold == claim.hold

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), lease_seconds=st.sampled_from([0.0, FAR]))
    def renew(self, data: st.DataObject, lease_seconds: float) -> None:
        some = data.draw(st.lists(st.sampled_from(self.claims), max_size=3, unique_by=lambda claim: claim.hold))
        self.both(lambda store: store.renew(LANE, [claim.hold for claim in some], lease_seconds=lease_seconds))

    def _publication(self, data: st.DataObject, claim: Claim) -> Publication:
        bodies = data.draw(st.lists(st.integers(0, 9), max_size=3))
        first = data.draw(st.sampled_from([None, *range(claim.job.num_events, claim.job.num_events + 4)]))
        events = [delta(f"{token} ", token, attempt=claim.job.attempt) for token in bodies]
        return Publication(hold=claim.hold, events=events, first_number=first)

    @precondition(lambda self: self.claims)
    @rule(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def publish_latest(self, tokens: list[int]) -> None:
        claim = self.claims[-1]
        events = [delta(f"{token} ", token, attempt=claim.job.attempt) for token in tokens]
        self.both(lambda store: store.publish(LANE, [Publication(hold=claim.hold, events=events)]))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.claims), max_size=3, unique_by=lambda claim: claim.hold))
        publications = [self._publication(data, claim) for claim in some]
        self.both(lambda store: store.publish(LANE, publications))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), succeeds=st.booleans(), has_last=st.booleans())
    def commit(self, data: st.DataObject, succeeds: bool, has_last: bool) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        last = self._publication(data, claim) if has_last else None
        error = JobError(code="some_error", message="because", param="p")
        outcome = success("ok", 1, 2) if succeeds else Outcome(status=Status.FAILED, error=error)
        self.both(lambda store: store.commit(claim.hold, outcome, last=last))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), delay_seconds=st.sampled_from([0.0, FAR]), reason=st.sampled_from(["retry", "hand_over"]))
    def release(self, data: st.DataObject, delay_seconds: float, reason: str) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        self.both(lambda store: store.release(claim.hold, reason=reason, delay_seconds=delay_seconds))

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(self.ids))
        self.both(lambda store: store.cancel(job_id))

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(self.ids))
        if self.both(lambda store: store.delete(job_id)) is True:
            self.ended.pop(job_id, None)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), seconds=st.sampled_from([None, 0.0, FAR]))
    def watch(self, data: st.DataObject, seconds: float | None) -> None:
        some = data.draw(st.lists(st.sampled_from(self.ids), max_size=3, unique=True))
        self.both(lambda store: store.watch(LANE, some, seconds=seconds))

    @rule(data=st.data(), limit=st.integers(1, 5))
    def read_logs(self, data: st.DataObject, limit: int) -> None:
        ids = [*self.ids, "job-1-unknown0"]
        after = data.draw(st.dictionaries(st.sampled_from(ids), st.integers(-1, 5), max_size=4))
        self.both(lambda store: self._logs(store, after, limit))

    @staticmethod
    async def _logs(store: JobStore, after: dict[str, int], limit: int) -> list[Any]:
        found = await store.read_logs(LANE, after, limit=limit)
        for job_id, events in found.items():
            assert timeless(events) == timeless(await store.events(job_id, after=after[job_id], limit=limit))
        return [[job_id, *events] for job_id, events in sorted(found.items())]

    @rule(steady_seconds=st.sampled_from([math.inf, 0.0]))
    def sweep(self, steady_seconds: float) -> None:
        self.both(lambda store: store.sweep(LANE, steady_seconds=steady_seconds))

    @rule()
    def pause(self) -> None:
        self.both(lambda store: store.set_paused(LANE, True))
        assert self.both(lambda store: store.claim(LANE, "a", free_tokens=None, lease_seconds=FAR)) is None
        self.both(lambda store: store.set_paused(LANE, False))

    @rule(hide_seconds=st.sampled_from([0.0, FAR]), limit=st.integers(1, 4))
    def take_notices(self, hide_seconds: float, limit: int) -> None:
        self.notices += self.both(lambda store: store.take_notices(LANE, limit=limit, hide_seconds=hide_seconds))

    @precondition(lambda self: self.notices)
    @rule(data=st.data(), delay_seconds=st.sampled_from([None, 0.0, FAR]))
    def settle_notice(self, data: st.DataObject, delay_seconds: float | None) -> None:
        notice = data.draw(st.sampled_from(self.notices))
        if delay_seconds is None:
            self.both(lambda store: store.delete_notice(notice))
        else:
            self.both(lambda store: store.delay_notice(notice, delay_seconds=delay_seconds))

    def _look(self, job_id: str) -> tuple[Job | None, list[Event]]:
        self.see(lambda store: store.position(job_id))
        self.see(lambda store: store.look(job_id))
        return self.see(lambda store: store.get(job_id)), self.see(lambda store: store.events(job_id))

    @invariant()
    def they_stand_alike(self) -> None:
        load = self.see(lambda store: store.load(LANE))
        self.see(lambda store: store.dead_letters(LANE))
        self.see(lambda store: store.list_jobs("default", limit=100))
        jobs: list[Job] = []
        logs: dict[str, list[Event]] = {}
        for job_id in self.ids:
            job, events = self._look(job_id)
            if job is None:
                continue
            jobs.append(job)
            logs[job_id] = events
            invariants.log_is_gapless(job, events)
            invariants.log_ends_once(job, events)
            invariants.attempts_follow_each_other(job, events)
            if job.status in TERMINAL:
                assert self.ended.setdefault(job_id, timeless(job)) == timeless(job)  # an end is an end
        invariants.stream_holds_the_living(self.server, LANE, jobs)
        invariants.clocks_hold_the_started(self.server, LANE, jobs)
        invariants.finished_jobs_expire(self.server, LANE, jobs)
        invariants.work_is_that_of_the_waiting(load, jobs, logs)


def _run(url: str, *, max_examples: int, stateful_step_count: int) -> None:
    with asyncio.Runner() as runner, operator(url) as server:
        jobs = runner.run(RedisJobs.connect(url))
        machine: Any = partial(Twins, runner, jobs, server)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=stateful_step_count,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        runner.run(jobs.close())


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums over finished jobs are halved soon."""
    monkeypatch.setattr(work, "MAX_JOBS", 3)


def test_the_twins_do_the_same(server_url: str) -> None:
    # A Cluster, whose every look takes several servers, sees fewer examples.
    _run(server_url, max_examples=3 if ClusterAddress.parse(server_url) else 15, stateful_step_count=20)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_twins_do_the_same_for_long(redis_url: str) -> None:
    _run(redis_url, max_examples=300, stateful_step_count=50)
