import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from infra.contracts import Claim, Hold, JobSpec, Kind, NewJob
from infra.keys import new_job_id
from infra.memory import MemoryJobs
from tests.worker.worker_aids import Faults, FaultyStore, until
from worker.lease import LeaseKeeper


class Heard:
    """Notes what the keeper's thread says."""

    def __init__(self) -> None:
        self.lost: list[Hold] = []
        self.failures: list[BaseException] = []
        self.something = threading.Event()

    def holds_lost(self, holds: list[Hold]) -> None:
        self.lost.extend(holds)
        self.something.set()

    def keeper_failed(self, error: BaseException) -> None:
        self.failures.append(error)
        self.something.set()


async def a_claim(store: MemoryJobs, lane: int, lease_seconds: float) -> Claim:
    job = NewJob(id=new_job_id(lane), spec=JobSpec(model="m", kind=Kind.GENERATE, prompt="p"), cost_tokens=1)
    await store.submit(job)
    claim = await store.claim(lane, "me", free_tokens=None, lease_seconds=lease_seconds)
    assert claim is not None
    return claim


class Keeping:
    """A keeper on a store of its own, with what it needs."""

    def __init__(self) -> None:
        self.store = MemoryJobs()
        self.faults = Faults()
        self.faulty = FaultyStore(self.store.another(), self.faults)
        self.heard = Heard()
        self.is_stalled = False

        async def open_store() -> FaultyStore:
            return self.faulty

        self.keeper = LeaseKeeper(
            open_store,  # type: ignore[arg-type]
            lease_seconds=0.4,
            renew_seconds=0.05,
            is_stalled=lambda: self.is_stalled,
            lost=self.heard.holds_lost,
            fail=self.heard.keeper_failed,
        )

    async def renewals(self, number: int) -> None:
        """Waits for so many more."""
        target = self.faults.calls["renew"] + number
        await until(lambda: self.faults.calls["renew"] >= target)


@pytest.fixture
async def keeping() -> AsyncIterator[Keeping]:
    keeping = Keeping()
    keeping.keeper.start()
    yield keeping
    await asyncio.to_thread(keeping.keeper.stop)
    assert keeping.heard.failures == []


async def test_a_blocked_event_loop_loses_no_lease(keeping: Keeping) -> None:
    lane = await keeping.store.open_lane("m")
    claim = await a_claim(keeping.store, lane, lease_seconds=0.4)
    keeping.keeper.hold(claim.hold)
    time.sleep(1.2)  # noqa: ASYNC251 (the loop is to be blocked, for three leases)
    assert await keeping.store.claim(lane, "other", free_tokens=None, lease_seconds=9) is None
    assert keeping.heard.lost == []


async def test_renewal_stops_while_no_step_finishes(keeping: Keeping) -> None:
    lane = await keeping.store.open_lane("m")
    claim = await a_claim(keeping.store, lane, lease_seconds=0.4)
    keeping.keeper.hold(claim.hold)
    keeping.is_stalled = True
    taken: list[Claim] = []

    async def take() -> None:
        while not taken:
            if again := await keeping.store.claim(lane, "other", free_tokens=None, lease_seconds=9):
                taken.append(again)
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        await take()
    assert (taken[0].job.id, taken[0].job.attempt, taken[0].job.lost_count) == (claim.job.id, 2, 1)
    assert keeping.heard.lost == []
    keeping.is_stalled = False
    await until(lambda: claim.hold in keeping.heard.lost)


async def test_a_cancelled_job_is_reported_lost_and_a_dropped_one_is_not(keeping: Keeping) -> None:
    lane = await keeping.store.open_lane("m")
    cancelled = await a_claim(keeping.store, lane, lease_seconds=9)
    dropped = await a_claim(keeping.store, lane, lease_seconds=9)
    keeping.keeper.hold(cancelled.hold)
    keeping.keeper.hold(dropped.hold)
    keeping.keeper.drop(dropped.hold)
    await keeping.store.cancel(cancelled.job.id)
    await keeping.store.cancel(dropped.job.id)
    await until(lambda: bool(keeping.heard.lost))
    await keeping.renewals(2)
    assert set(keeping.heard.lost) == {cancelled.hold}


async def test_a_silent_store_is_asked_again(keeping: Keeping) -> None:
    lane = await keeping.store.open_lane("m")
    claim = await a_claim(keeping.store, lane, lease_seconds=0.4)
    keeping.faults.lose_calls["renew"] = 4
    keeping.keeper.hold(claim.hold)
    await keeping.renewals(40)
    assert keeping.faults.lose_calls["renew"] == 0
    assert await keeping.store.claim(lane, "other", free_tokens=None, lease_seconds=9) is None


async def test_dropping_an_old_hold_keeps_the_newer_one(keeping: Keeping) -> None:
    lane = await keeping.store.open_lane("m")
    claim = await a_claim(keeping.store, lane, lease_seconds=9)
    keeping.keeper.hold(claim.hold)
    keeping.keeper.drop(Hold(job_id=claim.job.id, attempt=claim.job.attempt - 1))
    await keeping.store.cancel(claim.job.id)
    await until(lambda: keeping.heard.lost == [claim.hold] * len(keeping.heard.lost) and bool(keeping.heard.lost))


def a_keeper(
    open_store: Callable[[], Coroutine[Any, Any, MemoryJobs]],
    heard: Heard,
    *,
    lease_seconds: float,
    renew_seconds: float,
) -> LeaseKeeper:
    return LeaseKeeper(
        open_store,
        lease_seconds=lease_seconds,
        renew_seconds=renew_seconds,
        is_stalled=lambda: False,
        lost=heard.holds_lost,
        fail=heard.keeper_failed,
    )


def test_a_renewal_slower_than_the_lease_is_refused() -> None:
    async def open_store() -> MemoryJobs:
        return MemoryJobs()

    with pytest.raises(ValueError, match="under lease_seconds"):
        a_keeper(open_store, Heard(), lease_seconds=5, renew_seconds=5)


async def test_a_keeper_that_breaks_says_so() -> None:
    heard = Heard()

    async def open_store() -> MemoryJobs:
        raise RuntimeError("no such store")

    a_keeper(open_store, heard, lease_seconds=5, renew_seconds=1).start()
    assert await asyncio.to_thread(heard.something.wait, 20)
    assert [str(error) for error in heard.failures] == ["no such store"]
