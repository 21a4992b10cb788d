import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from infra.contracts import ChoiceDelta, Event, JobSpec, Kind, NewJob, Outcome
from infra.keys import new_job_id
from infra.memory import MemoryJobs
from infra.states import Status
from tests.worker.worker_aids import Faults, FaultyStore, until
from worker.attempt import Attempt, Commit, GiveBack, Phase
from worker.progress import Progress
from worker.publisher import Publisher


class Publishing:
    """A publisher on a faulty store, listening to itself."""

    def __init__(self, *, flush_seconds: float = 0.01) -> None:
        self.store = MemoryJobs()
        self.faults = Faults()
        self.faulty = FaultyStore(self.store, self.faults)
        self.refused: list[Attempt] = []
        self.ended: list[Attempt] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.publisher = Publisher(self.faulty, self, self.spawn, flush_seconds=flush_seconds)  # type: ignore[arg-type]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.ensure_future(work))

    def attempt_refused(self, attempt: Attempt) -> None:
        attempt.phase = Phase.OVER
        self.refused.append(attempt)

    def attempt_ended(self, attempt: Attempt) -> None:
        attempt.phase = Phase.OVER
        self.ended.append(attempt)

    async def claim(self, *, alias: str = "m", submit: bool = True) -> Attempt:
        lane = await self.store.open_lane(alias)
        if submit:
            spec = JobSpec(model=alias, kind=Kind.GENERATE, prompt="p")
            await self.store.submit(NewJob(id=new_job_id(lane), spec=spec, cost_tokens=1))
        claim = await self.store.claim(lane, "me", free_tokens=None, lease_seconds=30)
        assert claim is not None
        attempt = Attempt(claim)
        attempt.progress = Progress.of(1, claim.history)
        return attempt

    def emit(self, attempt: Attempt, token_id: int) -> None:
        attempt.add(ChoiceDelta(index=0, text=f"<{token_id}>", token_ids=[token_id]))
        self.publisher.touch(attempt)

    def commit(self, attempt: Attempt) -> None:
        attempt.add(ChoiceDelta(index=0, finish_reason="stop"))
        attempt.end = Commit(Outcome(status=Status.SUCCEEDED, result=attempt.progress.result))
        self.publisher.touch(attempt)

    async def log(self, attempt: Attempt) -> list[Event]:
        events = await self.store.events(attempt.job.id)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        return events

    async def emitted(self, attempt: Attempt) -> list[int]:
        return [i for event in await self.log(attempt) for delta in event.body.deltas for i in delta.token_ids]


@pytest.fixture
async def publishing() -> AsyncIterator[Publishing]:
    publishing = Publishing()
    yield publishing
    for task in publishing.tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*publishing.tasks, return_exceptions=True)


async def test_one_call_for_all_jobs_of_a_flush(publishing: Publishing) -> None:
    attempts = [await publishing.claim() for _ in range(20)]
    for token_id in range(5):
        for attempt in attempts:
            publishing.emit(attempt, token_id)
    await until(lambda: publishing.faults.calls["publish"] == 1)
    for attempt in attempts:
        assert await publishing.emitted(attempt) == list(range(5))
        assert [event.type for event in await publishing.log(attempt)].count("job.delta") == 1
    assert publishing.faults.calls["publish"] == 1


async def test_a_first_token_waits_for_no_flush_and_takes_the_others_along() -> None:
    publishing = Publishing(flush_seconds=600.0)
    old, new = await publishing.claim(), await publishing.claim()
    publishing.emit(old, 1)
    await until(lambda: publishing.faults.calls["publish"] == 1)
    publishing.emit(old, 2)
    await asyncio.sleep(0.05)
    assert await publishing.emitted(old) == [1]  # the next flush is due in ten minutes
    publishing.emit(new, 3)
    await until(lambda: publishing.faults.calls["publish"] == 2)
    assert (await publishing.emitted(old), await publishing.emitted(new)) == ([1, 2], [3])
    publishing.emit(new, 4)
    await asyncio.sleep(0.05)
    assert publishing.faults.calls["publish"] == 2
    for task in publishing.tasks:
        task.cancel()
    await asyncio.gather(*publishing.tasks, return_exceptions=True)


async def test_each_lane_has_its_own_call(publishing: Publishing) -> None:
    first, second = await publishing.claim(alias="a"), await publishing.claim(alias="b")
    assert first.lane != second.lane
    publishing.emit(first, 1)
    publishing.emit(second, 2)
    await until(lambda: publishing.faults.calls["publish"] == 2)
    assert await publishing.emitted(first) == [1]
    assert await publishing.emitted(second) == [2]


@pytest.mark.parametrize("fault", ["lose_calls", "lose_replies"])
async def test_nothing_is_lost_or_repeated_while_the_store_is_away(publishing: Publishing, fault: str) -> None:
    attempt = await publishing.claim()
    getattr(publishing.faults, fault).update(publish=3, commit=2)
    for token_id in range(30):
        publishing.emit(attempt, token_id)
        await asyncio.sleep(0.01)
    publishing.commit(attempt)
    await until(lambda: publishing.ended == [attempt])
    assert await publishing.emitted(attempt) == list(range(30))
    events = await publishing.log(attempt)
    assert [event.type for event in events if event.is_last] == ["job.succeeded"]
    job = await publishing.store.get(attempt.job.id)
    assert job is not None
    assert job.outcome is not None
    assert job.outcome.result == attempt.progress.result
    assert publishing.refused == []


async def test_the_last_deltas_go_with_the_commit(publishing: Publishing) -> None:
    attempt = await publishing.claim()
    attempt.add(ChoiceDelta(index=0, text="a", token_ids=[1]))
    publishing.commit(attempt)
    await until(lambda: publishing.ended == [attempt])
    assert publishing.faults.calls["publish"] == 0
    assert await publishing.emitted(attempt) == [1]


async def test_progress_is_published_before_a_job_is_given_back(publishing: Publishing) -> None:
    attempt = await publishing.claim()
    publishing.emit(attempt, 1)
    attempt.end = GiveBack("hand_over")
    publishing.publisher.touch(attempt)
    await until(lambda: publishing.ended == [attempt])
    again = await publishing.claim(submit=False)
    assert (again.job.id, again.job.attempt, again.job.lost_count) == (attempt.job.id, 2, 0)
    assert again.progress.choices[0].token_ids == [1]
    publishing.emit(again, 2)
    publishing.commit(again)
    await until(lambda: again in publishing.ended)
    assert await publishing.emitted(again) == [1, 2]


async def test_a_cancelled_job_is_refused_and_its_neighbours_are_not(publishing: Publishing) -> None:
    cancelled, other, committed = [await publishing.claim() for _ in range(3)]
    await publishing.store.cancel(cancelled.job.id)
    await publishing.store.cancel(committed.job.id)
    publishing.emit(cancelled, 1)
    publishing.emit(other, 2)
    publishing.commit(committed)
    await until(lambda: len(publishing.refused) == 2)
    assert set(publishing.refused) == {cancelled, committed}
    await until(lambda: publishing.faults.calls["publish"] == 1)
    assert await publishing.emitted(cancelled) == []
    assert await publishing.emitted(committed) == []
    assert await publishing.emitted(other) == [2]


async def test_a_lost_attempt_is_forgotten_while_the_store_is_away(publishing: Publishing) -> None:
    lost, other = await publishing.claim(), await publishing.claim()
    publishing.faults.is_away = True
    publishing.emit(lost, 1)
    publishing.emit(other, 2)
    await until(lambda: publishing.faults.calls["publish"] >= 2)
    lost.phase = Phase.OVER
    publishing.faults.is_away = False
    publishing.commit(other)
    await until(lambda: publishing.ended == [other])
    assert await publishing.emitted(lost) == []
    assert await publishing.emitted(other) == [2]


async def test_a_log_that_lost_events_costs_its_own_attempt_alone(publishing: Publishing) -> None:
    """As after a failover to a replica that lagged: our next number would leave a gap."""
    gone, other, committed = [await publishing.claim() for _ in range(3)]
    for attempt in (gone, committed):
        attempt._next_number += 2
    publishing.emit(gone, 1)
    publishing.emit(other, 2)
    publishing.commit(committed)
    await until(lambda: len(publishing.refused) == 2)
    assert set(publishing.refused) == {gone, committed}
    assert await publishing.emitted(gone) == []
    assert await publishing.emitted(other) == [2]


async def test_a_commit_with_nothing_to_add_notices_that_the_log_lost_events(publishing: Publishing) -> None:
    attempt = await publishing.claim()
    publishing.emit(attempt, 1)
    await until(lambda: publishing.faults.calls["publish"] == 1 and attempt.take_publication() is None)
    attempt._next_number += 1  # as if one more had been acknowledged, and lost in a failover
    attempt.end = Commit(Outcome(status=Status.SUCCEEDED, result=attempt.progress.result))
    publishing.publisher.touch(attempt)
    await until(lambda: bool(publishing.refused or publishing.ended))
    assert (publishing.refused, publishing.ended) == ([attempt], [])
    assert (await publishing.log(attempt))[-1].type == "job.delta"
