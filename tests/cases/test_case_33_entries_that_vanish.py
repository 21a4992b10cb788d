"""Case 33 [redis-py#1191, #2226]: somebody deletes entries of a stream, pending ones and others, several pages of them.

The kind: what a stream has lost. No job depends on its entry: those that run end, those that wait are given a new one,
those whose records are gone are told to be unknown, and nothing runs twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import redis

from infra.contracts import Claim, Tier
from infra.errors import UnknownJob
from infra.jobs import RedisJobs
from infra.keys import Lane
from infra.states import Status
from tests.infra.jobs_for_tests import ALIAS, LEASE, check_log, claimed, submitted, success

PAGES = 3
PAGE = 64


@pytest.fixture
async def jobs(redis_url: str) -> AsyncIterator[RedisJobs]:
    opened = await RedisJobs.connect(redis_url)
    yield opened
    await opened.close()


async def worked_off(jobs: RedisJobs, lane: int) -> list[str]:
    """Ids of all that can be claimed, each brought to its end."""
    ids = []
    while (claim := await jobs.claim(lane, "w", free_tokens=None, lease_seconds=LEASE)) is not None:
        assert await jobs.commit(claim.hold, success())
        ids.append(claim.job.id)
    return ids


def delete_all(server: redis.Redis, stream: str) -> None:
    server.xdel(stream, *(entry for entry, _ in server.xrange(stream)))


def trim_all(server: redis.Redis, stream: str) -> None:
    server.xtrim(stream, maxlen=0, approximate=False)


def drop_stream(server: redis.Redis, stream: str) -> None:
    server.delete(stream)


@pytest.mark.parametrize("fault", [delete_all, trim_all, drop_stream])
async def test_jobs_outlive_their_entries(
    jobs: RedisJobs, redis_url: str, fault: Callable[[redis.Redis, str], None]
) -> None:
    lane = await jobs.open_lane(ALIAS)
    ids = [await submitted(jobs, lane) for _ in range(PAGES * PAGE)]
    running = [await claimed(jobs, lane) for _ in range(PAGE)]
    gone = ids[-5:]
    with redis.Redis.from_url(redis_url) as server:
        fault(server, Lane(lane).stream(Tier.STANDARD))
        for job_id in gone:
            server.delete(Lane(lane).job(job_id), Lane(lane).events(job_id))
    assert await worked_off(jobs, lane) == []
    await jobs.sweep(lane)
    assert sorted(await worked_off(jobs, lane)) == sorted(ids[PAGE:-5])
    for claim in running:
        assert await jobs.commit(claim.hold, success())
    for job_id in ids[:-5]:
        job = await jobs.get(job_id)
        assert job is not None and (job.status, job.attempt) == (Status.SUCCEEDED, 1)
        await check_log(jobs, job_id)
    for job_id in gone:  # a client is told, instead of waiting for ever
        assert await jobs.get(job_id) is None
        with pytest.raises(UnknownJob):
            await jobs.events(job_id)
    load = await jobs.load(lane)
    assert (load.num_waiting, load.running) == (0, 0)


async def test_several_pages_of_lapsed_leases_are_all_taken_over(jobs: RedisJobs, redis_url: str) -> None:
    lane = await jobs.open_lane(ALIAS)
    ids = [await submitted(jobs, lane) for _ in range(PAGES * PAGE)]
    lost: list[Claim] = [await claimed(jobs, lane, "dead") for _ in ids]
    with redis.Redis.from_url(redis_url) as server:
        assert server.xpending(Lane(lane).stream(Tier.STANDARD), "workers")["pending"] == len(ids)
        for claim in lost[::7]:
            server.delete(Lane(lane).job(claim.job.id), Lane(lane).events(claim.job.id))
        server.zadd(Lane(lane).due, dict.fromkeys(ids, 0), xx=True)  # all leases have lapsed
    gone = {claim.job.id for claim in lost[::7]}
    assert sorted(await worked_off(jobs, lane)) == sorted(set(ids) - gone)
    assert not await jobs.commit(lost[1].hold, success())  # who lost its lease has no say
    assert (await jobs.load(lane)).num_waiting == 0


async def test_a_sweep_changes_nothing_where_nothing_is_missing(jobs: RedisJobs, redis_url: str) -> None:
    lane = await jobs.open_lane(ALIAS)
    for tier in Tier:
        for _ in range(3):
            await submitted(jobs, lane, tier=tier)
    with redis.Redis.from_url(redis_url) as server:
        before = [server.xrange(Lane(lane).stream(tier)) for tier in Tier]
        await jobs.sweep(lane)
        assert [server.xrange(Lane(lane).stream(tier)) for tier in Tier] == before
