"""The event hub: every reader gets every event once, in order, however slow it is and whatever fails."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from api_gateway import event_hub
from api_gateway.errors import GatewayClosing
from api_gateway.event_hub import EventHub
from infra import keys
from infra.contracts import ChoiceDelta, Claim, Event, EventBody, JobSpec, Kind, NewJob, Outcome, Publication
from infra.errors import EventsGone, StoreUnavailable, UnknownJob
from infra.memory import MemoryJobs
from infra.states import Status
from infra.store import JobStore
from tests.gateway.scripted import FaultyStore, until

PAGE = 4
LONG_SECONDS = 20.0
READS = {"events", "read_logs"}


class Counting:
    """Counts the calls of a store."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


@asynccontextmanager
async def hub_over(store: Any) -> AsyncIterator[EventHub]:
    hub = EventHub(store, page=PAGE)
    hub.start()
    yield hub
    await hub.close()


async def started(store: MemoryJobs) -> Claim:
    """A job that runs: its log has `job.queued` and `job.started`."""
    lane = await store.open_lane("m")
    spec = JobSpec(model="m", kind=Kind.GENERATE, prompt="x")
    await store.submit(NewJob(id=keys.new_job_id(lane), spec=spec))
    claim = await store.claim(lane, "w", free_tokens=None, lease_seconds=60)
    assert claim is not None
    return claim


async def write(store: JobStore, claim: Claim, num_events: int = 1) -> None:
    events = [EventBody(deltas=[ChoiceDelta(index=0, text="x")]) for _ in range(num_events)]
    await store.publish(claim.job.lane, [Publication(hold=claim.hold, events=events)])


async def end(store: JobStore, claim: Claim) -> None:
    assert await store.commit(claim.hold, Outcome(status=Status.SUCCEEDED))


async def read_all(hub: EventHub, job_id: str, *, after: int = -1, pause_seconds: float = 0.0) -> list[Event]:
    """Everything until the end, with a pause after each batch."""
    found: list[Event] = []
    with hub.follow(job_id, after=after) as reader:
        while not (found and found[-1].is_last):
            found += await reader.next(timeout=LONG_SECONDS)
            if pause_seconds:
                await asyncio.sleep(pause_seconds)
    return found


def assert_complete(found: Sequence[Event], *, after: int = -1) -> None:
    assert [event.sequence_number for event in found] == list(range(after + 1, after + 1 + len(found)))
    assert found[-1].is_last


async def test_a_reader_that_does_not_keep_up_is_bounded_and_misses_nothing() -> None:
    store = MemoryJobs()
    claim = await started(store)
    async with hub_over(store) as hub:
        with hub.follow(claim.job.id) as slow:
            fast = asyncio.create_task(read_all(hub, claim.job.id))
            assert len(await slow.next(timeout=LONG_SECONDS)) == 2
            await asyncio.sleep(0.05)
            for _ in range(40):
                await write(store, claim, 3)
                await asyncio.sleep(0.002)  # the fast one keeps up: the slow one is pushed what it does not take
                assert len(slow._queue) <= event_hub.QUEUE_PAGES * PAGE
            await end(store, claim)
            assert_complete(await fast)
            found: list[Event] = []
            while not (found and found[-1].is_last):
                batch = await slow.next(timeout=LONG_SECONDS)
                assert len(batch) <= event_hub.QUEUE_PAGES * PAGE
                found += batch
            assert [event.sequence_number for event in found] == list(range(2, 123))
        assert hub.num_readers == 0


async def test_one_read_serves_all_readers_of_a_log() -> None:
    counting = Counting(MemoryJobs())
    store: Any = counting
    claim = await started(store)
    async with hub_over(store) as hub:
        readers = [asyncio.create_task(read_all(hub, claim.job.id)) for _ in range(50)]
        await until(lambda: hub.num_readers == 50)
        await until(lambda: counting.calls["events"] >= 50)  # each looked once for itself
        await asyncio.sleep(0.05)
        before = counting.calls["events"] + counting.calls["read_logs"]
        for _ in range(20):
            await write(store, claim)
            await asyncio.sleep(0.01)
        await end(store, claim)
        for reader in readers:
            assert_complete(await reader)
        assert counting.calls["events"] + counting.calls["read_logs"] - before <= 2 * 21


async def test_logs_that_grow_together_are_read_together() -> None:
    """64 jobs of one batch: as many reads as flushes, and not 64 times as many."""
    counting = Counting(MemoryJobs())
    store: Any = counting
    claims = [await started(store) for _ in range(64)]
    lane = claims[0].job.lane
    async with hub_over(store) as hub:
        readers = [asyncio.create_task(read_all(hub, claim.job.id)) for claim in claims]
        await until(lambda: hub.num_readers == 64)
        await until(lambda: counting.calls["events"] >= 64)
        await asyncio.sleep(0.05)
        before = counting.calls["events"] + counting.calls["read_logs"]
        for _ in range(20):
            body = EventBody(deltas=[ChoiceDelta(index=0, text="x")])
            await store.publish(lane, [Publication(hold=claim.hold, events=[body]) for claim in claims])
            await asyncio.sleep(0.01)
        assert counting.calls["events"] + counting.calls["read_logs"] - before <= 20
        for claim in claims:
            await end(store, claim)
        for reader in readers:
            assert_complete(await reader)


async def test_a_log_that_cannot_be_read_does_not_hold_up_the_others() -> None:
    store: Any = MemoryJobs()
    gone, claim = await started(store), await started(store)
    async with hub_over(store) as hub:
        with hub.follow(gone.job.id) as reader:
            assert len(await reader.next(timeout=LONG_SECONDS)) == 2
            following = asyncio.create_task(read_all(hub, claim.job.id))
            await until(lambda: hub.num_readers == 2)
            await asyncio.sleep(0.05)
            await end(store, gone)
            await store.delete(gone.job.id)
            await end(store, claim)
            assert_complete(await following)
            with pytest.raises(UnknownJob):
                while True:
                    await reader.next(timeout=LONG_SECONDS)


async def test_random_readers_of_random_logs() -> None:
    """Readers come at any time, from any position, and read at any pace, over pages of four."""
    for seed in range(15):
        chance = random.Random(seed)
        store = MemoryJobs()
        async with hub_over(store) as hub:

            async def write_log(claim: Claim, chance: random.Random = chance, store: MemoryJobs = store) -> None:
                for _ in range(chance.randrange(25)):
                    await write(store, claim, chance.randrange(1, 8))
                    await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003]))
                await end(store, claim)

            async def read_log(
                claim: Claim, chance: random.Random = chance, hub: EventHub = hub
            ) -> tuple[int, list[Event]]:
                await asyncio.sleep(chance.random() * 0.03)
                after = chance.choice([-1, -1, 0, 1])
                pause_seconds = chance.choice([0, 0, 0.001, 0.01])
                return after, await read_all(hub, claim.job.id, after=after, pause_seconds=pause_seconds)

            claims = [await started(store) for _ in range(4)]
            writers = [write_log(claim) for claim in claims]
            readers = [read_log(chance.choice(claims)) for _ in range(12)]
            results = await asyncio.gather(*writers, *readers)
            for after, found in filter(None, results):
                assert_complete(found, after=after)
            assert hub.num_readers == 0 and not hub._logs


async def test_faults_of_the_store_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hub, "RETRY_SECONDS", 0.01)
    faulty = FaultyStore(MemoryJobs(), set())
    store: Any = faulty
    claim = await started(store)
    async with hub_over(store) as hub:
        readers = [asyncio.create_task(read_all(hub, claim.job.id)) for _ in range(3)]
        for turn in range(12):
            faulty.refused = [READS, {"wait_for_events"}, READS | {"wait_for_events"}, set[str]()][turn % 4]
            await write(store, claim, 2)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)
        faulty.refused = READS
        await end(store, claim)  # the last hint comes while the log cannot be read
        await asyncio.sleep(0.05)
        faulty.refused = set()
        for reader in readers:
            assert_complete(await reader)


async def test_a_reader_gives_up_on_a_store_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hub, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(event_hub, "PATIENCE_SECONDS", 0.05)
    faulty = FaultyStore(MemoryJobs(), {"events"})
    async with hub_over(faulty) as hub:
        with hub.follow("job-1-0123456789ab") as reader, pytest.raises(StoreUnavailable):
            await reader.next(timeout=LONG_SECONDS)


class Deaf:
    """A store whose feeds say nothing."""

    def __init__(self, store: JobStore) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def wait_for_events(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        await asyncio.sleep(timeout)
        return set()


async def test_a_lost_hint_delays_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hub, "RECHECK_SECONDS", 0.05)
    store: Any = Deaf(MemoryJobs())
    claim = await started(store)
    async with hub_over(store) as hub:
        await asyncio.sleep(0)
        with hub.follow(claim.job.id) as reader:
            assert len(await reader.next(timeout=LONG_SECONDS)) == 2
            await until(lambda: hub._lanes_seen == {1})
            await asyncio.sleep(0.05)
            await end(store, claim)
            found: list[Event] = []
            for _ in range(20):
                found += await reader.next(timeout=0.02)
            assert_complete(found, after=1)


async def test_a_reader_that_is_overtaken_reads_for_itself() -> None:
    """What one reader found by looking is not read again for the others: they have to look too."""
    store: Any = Deaf(MemoryJobs())
    claim = await started(store)
    async with hub_over(store) as hub:
        waiting = asyncio.create_task(read_all(hub, claim.job.id))
        await until(lambda: hub._lanes_seen == {1})
        await asyncio.sleep(0.05)
        await end(store, claim)
        assert_complete(await read_all(hub, claim.job.id))
        async with asyncio.timeout(5):
            assert_complete(await waiting)


async def test_a_gap_in_what_is_pushed_is_read_from_the_log() -> None:
    store = MemoryJobs()
    claim = await started(store)
    async with hub_over(store) as hub:
        with hub.follow(claim.job.id) as reader:
            assert len(await reader.next(timeout=LONG_SECONDS)) == 2
            await write(store, claim, 3)
            reader.push((await store.events(claim.job.id))[4:])
            assert [event.sequence_number for event in await reader.next(timeout=LONG_SECONDS)] == [2, 3, 4]


async def test_unknown_and_expired_logs() -> None:
    store = MemoryJobs()
    claim = await started(store)
    await end(store, claim)
    async with hub_over(store) as hub:
        await store.delete(claim.job.id)
        with hub.follow(claim.job.id) as reader, pytest.raises(UnknownJob):
            await reader.next(timeout=LONG_SECONDS)

        class Expired(Deaf):
            async def events(self, *args: Any, **kwargs: Any) -> list[Event]:
                raise EventsGone

    async with hub_over(Expired(store)) as hub:
        with hub.follow(claim.job.id) as reader, pytest.raises(EventsGone):
            await reader.next(timeout=LONG_SECONDS)


async def test_closing_wakes_readers_in_two_steps() -> None:
    store = MemoryJobs()
    claim = await started(store)
    async with hub_over(store) as hub:

        async def wait(ends_early: bool) -> str:
            with hub.follow(claim.job.id, after=1, ends_early=ends_early) as reader:
                try:
                    await reader.next(timeout=LONG_SECONDS)
                except GatewayClosing:
                    return "closed"
                return "read"

        early, late = asyncio.create_task(wait(True)), asyncio.create_task(wait(False))
        await until(lambda: hub.num_readers == 2)
        hub.close_streams()
        assert await early == "closed"
        await write(store, claim)
        assert await late == "read"
        late = asyncio.create_task(wait(False))
        await asyncio.sleep(0)
        await hub.close()
        assert await late in ("closed", "read")
