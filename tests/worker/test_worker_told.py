"""What a worker tells of itself: what runs in it, what is left of that, and that it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from infra.contracts import WorkerRecord
from infra.store import JobStore
from tests.worker.worker_aids import ENGINE, SETTINGS, Backend, Faults, serving, submit, the_end
from worker import told

SLOW = replace(ENGINE, fake_seconds_per_step=0.02)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "TELL_SECONDS", 0.01)


async def until_told(store: JobStore, is_so: Callable[[WorkerRecord], bool]) -> WorkerRecord:
    async with asyncio.timeout(20):
        while True:
            for record in await store.workers("fake"):
                if is_so(record):
                    return record
            await asyncio.sleep(0.005)


async def test_a_worker_tells_what_it_runs(backend: Backend) -> None:
    async with serving(backend, engine=SLOW):
        idle = await until_told(backend.store, lambda record: record.num_jobs == 0 and record.lanes != [])
        assert (idle.num_seats, idle.remaining, idle.prompt_tokens, idle.takes_jobs) == (16, [], 0, True)
        assert idle.lanes == await backend.store.lanes("fake")
        ids = [await submit(backend.store, "x" * 20, max_tokens=60, n=n, cost_tokens=20 + 60 * n) for n in (1, 2)]
        busy = await until_told(backend.store, lambda record: len(record.remaining) == 3 and record.remaining[0] < 55)
        assert busy.num_jobs == 2 and busy.prompt_tokens == 0
        assert busy.free_tokens < idle.free_tokens
        later = await until_told(backend.store, lambda record: max(record.remaining, default=0) < busy.remaining[0])
        assert later.remaining == sorted(later.remaining)
        for job_id in ids:
            await the_end(backend.store, job_id)
        measured = await until_told(backend.store, lambda record: record.num_jobs == 0 and record.pace is not None)
        assert measured.pace is not None
        assert measured.pace.seconds_per_step + 3 * measured.pace.seconds_per_output_token > 0.02
        assert measured.free_tokens == idle.free_tokens
    assert await backend.store.workers("fake") == []  # it has said goodbye


async def test_work_handed_over_is_told_by_what_is_left(backend: Backend) -> None:
    """The tokens that an earlier attempt emitted are not drawn again, and are computed with the prompt."""
    async with serving(backend, settings=replace(SETTINGS, drain_seconds=0.05), engine=SLOW) as first:
        job_id = await submit(backend.store, "x" * 20, max_tokens=60, cost_tokens=80)
        await until_told(backend.store, lambda record: max(record.remaining, default=60) < 50)
        await first.stop()
    load = await backend.store.load((await backend.store.lanes("fake"))[0])
    left = load.work["standard"]
    assert left.output_tokens < 50 and left.tokens == 80
    async with serving(backend, engine=replace(ENGINE, fake_seconds_per_step=0.05)):
        record = await until_told(backend.store, lambda record: record.num_jobs == 1)
        assert record.remaining[0] <= left.output_tokens
        await the_end(backend.store, job_id)


async def test_a_draining_worker_takes_no_jobs(backend: Backend) -> None:
    async with serving(backend, engine=SLOW) as running:
        await submit(backend.store, "x", max_tokens=60)
        await until_told(backend.store, lambda record: record.num_jobs == 1)
        running.stopping.tell()
        await until_told(backend.store, lambda record: not record.takes_jobs)


async def test_a_store_that_is_away_stops_no_worker(backend: Backend) -> None:
    faults = Faults()
    async with serving(backend.with_faults(faults)) as running:
        faults.lose_calls["put_worker"] = 3
        await until_told(backend.store, lambda record: True)
        faults.lose_calls["drop_worker"] = 1
        assert await running.stop()
    assert len(await backend.store.workers("fake")) == 1  # until its time is over


async def test_the_card_says_how_long_a_start_takes_and_how_many_may_come(backend: Backend) -> None:
    async with serving(backend, settings=replace(SETTINGS, cold_start_seconds=40.0, max_workers=6)):
        [card] = (await backend.store.cards()).values()
        assert card.cold_start_seconds is not None and 40.0 < card.cold_start_seconds < 60.0
        assert card.max_workers == 6
