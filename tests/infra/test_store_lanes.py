"""Several lanes of an alias, over each backend: added, closed, drained, dropped, and met again by late jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from infra import keys
from infra.errors import Conflict, UnknownLane
from infra.jobs import RedisJobs
from infra.keys import Lane
from infra.settings import QueueSettings
from infra.states import Status
from infra.store import JobStore, LaneState
from tests.infra.conftest import operator
from tests.infra.jobs_for_tests import ALIAS, LEASE, check_log, claimed, new_job, submitted, success, types


async def states(store: JobStore) -> dict[int, bool]:
    return {lane.number: lane.is_open for lane in await store.lane_states()}


async def test_lanes_are_added_and_closed_and_opened(store: JobStore) -> None:
    first, other = await store.open_lane(ALIAS), await store.open_lane("other")
    second = await store.add_lane(ALIAS)
    assert len({first, second, other}) == 3
    assert await store.lanes(ALIAS) == [first, second]
    assert await store.open_lane(ALIAS) == first
    await store.set_open(first, False)
    await store.set_open(first, False)
    assert await store.lane_states() == [
        LaneState(first, ALIAS, False), LaneState(other, "other", True), LaneState(second, ALIAS, True),
    ]  # fmt: skip
    assert await store.lanes(ALIAS) == [first, second]  # still served
    assert await store.open_lane(ALIAS) == second
    with pytest.raises(Conflict, match="last open one"):
        await store.set_open(second, False)
    await store.set_open(first, True)
    await store.set_open(second, False)
    assert await states(store) == {first: True, other: True, second: False}
    for is_open in (True, False):
        with pytest.raises(UnknownLane):
            await store.set_open(99, is_open)


async def test_a_closed_lane_is_dropped_when_nothing_is_left_in_it(store: JobStore) -> None:
    first, second = await store.open_lane(ALIAS), await store.add_lane(ALIAS)
    ended, waits = await submitted(store, first), await submitted(store, first)
    assert await store.drop_drained() == []  # an open one never
    await store.set_open(first, False)
    assert await store.drop_drained() == []
    assert await store.commit((await claimed(store, first)).hold, success())
    assert await store.drop_drained() == []
    claim = await claimed(store, first)
    assert claim.job.id == waits
    assert await store.drop_drained() == []
    assert await store.release(claim.hold, reason="retry", delay_seconds=0)
    assert await store.drop_drained() == []
    assert await store.commit((await claimed(store, first)).hold, success())
    assert await store.drop_drained() == [first]
    assert await store.drop_drained() == []
    assert await store.lanes(ALIAS) == [second]
    for job_id in (ended, waits):  # what has ended is read as before
        job = await store.get(job_id)
        assert job is not None and job.status is Status.SUCCEEDED
        assert types(await check_log(store, job_id))[-1] == "succeeded"
    assert await store.add_lane(ALIAS) > second  # no number comes back
    with pytest.raises(UnknownLane):
        await store.set_open(first, True)


async def test_a_late_job_brings_its_lane_back_until_it_is_done(store: JobStore) -> None:
    first = await store.open_lane(ALIAS)
    await store.add_lane(ALIAS)
    late, later = new_job(first), new_job(first)  # ids drawn, and then their gateway was slow
    await store.set_open(first, False)
    assert await store.drop_drained() == [first]
    assert await store.submit(late)
    assert not await store.submit(late)
    assert (await states(store))[first] is False
    assert await store.drop_drained() == []
    assert (await claimed(store, first)).job.id == late.id
    await store.cancel(late.id)
    assert await store.drop_drained() == [first]
    assert await store.submit(later)
    assert (await claimed(store, first)).job.id == later.id


@pytest.fixture
async def jobs(server_url: str) -> AsyncIterator[RedisJobs]:
    opened = await RedisJobs.connect(server_url, settings=QueueSettings(dead_letter_seconds=0.3))
    yield opened
    await opened.close()


async def test_notices_and_dead_letters_hold_a_lane(jobs: RedisJobs, server_url: str) -> None:
    first = await jobs.open_lane(ALIAS)
    await jobs.add_lane(ALIAS)
    await jobs.set_open(first, False)
    with operator(server_url) as server:
        server.zadd(Lane(first).outbox, {"notice": 10**15})
        assert await jobs.drop_drained() == []
        server.delete(Lane(first).outbox)
        server.zadd(Lane(first).dead, {"job": time.time_ns() // 1_000_000})
        assert await jobs.drop_drained() == []
        await asyncio.sleep(0.5)  # dead letters of this store are kept for 0.3 s
        assert await jobs.drop_drained() == [first]
        assert not server.exists(Lane(first).due)


async def test_a_drop_that_stops_half_way_loses_no_job(jobs: RedisJobs) -> None:
    """The two steps of a drop, and a late job's way, in every order."""
    first = await jobs.open_lane(ALIAS)
    await jobs.add_lane(ALIAS)
    for is_forgotten_late in (False, True):
        await jobs.set_open(first, False)
        moment = (await jobs._server.command("HGETALL", keys.CLOSED_LANES))[b"%d" % first]
        assert await jobs._on_lane(first, "drop", [moment]) == 1
        late = new_job(first)
        if is_forgotten_late:
            assert await jobs.submit(late)
        assert await jobs._scripts.call("forget_lane", [keys.LANES, keys.CLOSED_LANES], [first, moment]) == int(
            not is_forgotten_late
        )
        if not is_forgotten_late:
            assert await jobs.submit(late)
        assert first in await jobs.lanes(ALIAS)  # somebody serves it
        claim = await jobs.claim(first, "w", free_tokens=None, lease_seconds=LEASE)
        assert claim is not None and claim.job.id == late.id
        assert await jobs.commit(claim.hold, success())
        assert await jobs.drop_drained() == [first]
        await jobs.submit(again := new_job(first))
        assert await jobs.cancel(again.id)


async def test_late_jobs_and_drops_at_once(jobs: RedisJobs, server_url: str) -> None:
    first = await jobs.open_lane(ALIAS)
    await jobs.add_lane(ALIAS)
    await jobs.set_open(first, False)
    other = await RedisJobs.connect(server_url)

    async def dropping() -> None:
        for _ in range(40):
            await other.drop_drained()

    async def submitting() -> None:
        for _ in range(20):
            job = new_job(first)
            assert await jobs.submit(job)
            assert first in await jobs.lanes()
            await jobs.cancel(job.id)

    await asyncio.gather(dropping(), submitting())
    await other.close()
