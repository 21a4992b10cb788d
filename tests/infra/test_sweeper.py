"""Who sweeps judges watches only where those who wait had the time to say so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from infra.clock import ManualClock
from infra.contracts import NewJob
from infra.errors import StoreUnavailable
from infra.memory import MemoryJobs
from infra.sweeper import Sweeper
from tests.infra.jobs_for_tests import ALIAS, new_job

WATCH_SECONDS = 60


class Outage:
    """A store that may be away for this process."""

    def __init__(self, store: MemoryJobs) -> None:
        self._store = store
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        if self.is_away:
            raise StoreUnavailable
        return getattr(self._store, name)


async def watched(store: MemoryJobs, lane: int) -> NewJob:
    job = new_job(lane)
    job.watch_ms = WATCH_SECONDS * 1000
    await store.submit(job)
    return job


async def test_an_outage_longer_than_a_watch_cancels_nobody_who_still_waits() -> None:
    clock = ManualClock()
    store = MemoryJobs(clock=clock)
    lane = await store.open_lane(ALIAS)
    seen = Outage(store)
    sweeper = Sweeper(seen, clock=lambda: clock.now_ms() / 1000)  # type: ignore[arg-type]
    alive, gone = await watched(store, lane), await watched(store, lane)
    assert (await sweeper.sweep()).cancelled == []
    seen.is_away = True
    clock.advance(ms=2 * WATCH_SECONDS * 1000)
    with pytest.raises(StoreUnavailable):
        await sweeper.sweep()
    seen.is_away = False
    assert (await sweeper.sweep()).cancelled == []  # before anyone could say that he still waits
    clock.advance(ms=1000)
    await store.watch(lane, [alive.id], seconds=WATCH_SECONDS)
    clock.advance(ms=(WATCH_SECONDS - 2) * 1000)
    assert (await sweeper.sweep()).cancelled == []
    clock.advance(ms=1000)
    assert (await sweeper.sweep()).cancelled == [gone.id]
    assert (await sweeper.sweep()).cancelled == []
    clock.advance(ms=1000)
    assert (await sweeper.sweep()).cancelled == [alive.id]


async def test_a_sweeper_that_has_just_started_judges_no_watch() -> None:
    clock = ManualClock()
    store = MemoryJobs(clock=clock)
    job = await watched(store, await store.open_lane(ALIAS))
    clock.advance(ms=2 * WATCH_SECONDS * 1000)
    sweeper = Sweeper(store, clock=lambda: clock.now_ms() / 1000)
    assert (await sweeper.sweep()).cancelled == []
    clock.advance(ms=WATCH_SECONDS * 1000)
    assert (await sweeper.sweep()).cancelled == [job.id]


async def test_many_unjudged_watches_end_a_sweep(redis_url: str) -> None:
    """More of them than one script looks at: the sweep comes to its end all the same."""
    from infra.jobs import RedisJobs

    jobs = await RedisJobs.connect(redis_url)
    lane = await jobs.open_lane(ALIAS)
    for _ in range(210):
        job = new_job(lane)
        job.watch_ms = 1
        await jobs.submit(job)
    await asyncio.sleep(0.01)
    async with asyncio.timeout(20):
        assert (await jobs.sweep(lane, steady_seconds=0.0)).cancelled == []
        assert len((await jobs.sweep(lane, steady_seconds=1.0)).cancelled) == 210
    await jobs.close()
