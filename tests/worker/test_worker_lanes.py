"""A worker serves all lanes of its alias: those added while it runs, and closed ones until they are dropped."""

from __future__ import annotations

import asyncio

import pytest

from infra.contracts import JobSpec, Kind, NewJob
from infra.keys import new_job_id
from infra.states import Status
from infra.store import JobStore
from tests.worker.worker_aids import Backend, Faults, checked_log, serving, the_end
from worker import consumer


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "LANES_SECONDS", 0.05)
    monkeypatch.setattr(consumer, "DOORBELL_SECONDS", 0.05)


async def submit_to(store: JobStore, lane: int) -> str:
    spec = JobSpec(model="fake", kind=Kind.GENERATE, prompt="hello", params={"seed": 7, "max_tokens": 8})
    job = NewJob(id=new_job_id(lane), spec=spec, cost_tokens=50)
    assert await store.submit(job)
    return job.id


async def test_lanes_come_and_go_under_a_worker(backend: Backend) -> None:
    store = backend.store
    async with serving(backend):
        first = await store.open_lane("fake")
        second = await store.add_lane("fake")
        ids = [await submit_to(store, lane) for lane in (first, second, first, second)]
        await store.set_open(first, False)
        ids.append(await submit_to(store, first))  # by a gateway that has not heard of it
        for job_id in ids:
            assert (await the_end(store, job_id)).status is Status.SUCCEEDED
            await checked_log(store, job_id)
        assert await store.drop_drained() == [first]
        async with asyncio.timeout(20):
            while [worker.lanes for worker in await store.workers("fake")] != [[second]]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        late = await submit_to(store, first)  # and one that is very slow: the lane comes back
        assert (await the_end(store, late)).status is Status.SUCCEEDED


async def test_a_lane_whose_server_is_away_holds_no_other(backend: Backend) -> None:
    faults = Faults()
    store = backend.store
    first, second = await store.open_lane("fake"), await store.add_lane("fake")
    async with serving(backend.with_faults(faults)):
        faults.away_lanes.add(first)
        job_id, waits = await submit_to(store, second), await submit_to(store, first)
        assert (await the_end(store, job_id)).status is Status.SUCCEEDED
        assert (await store.load(first)).num_waiting == 1
        faults.away_lanes.clear()
        assert (await the_end(store, waits)).status is Status.SUCCEEDED
