"""Case 36 [symfony#35358; redis#11567]: two workers of one name, and a pool that shrinks while jobs run.

The kind: names that are not unique (pods of one hostname, all with pid 1), and consumers that go away with work of
theirs. A worker is known by a random owner; nothing depends on consumers of the group, of which there is one.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
import redis

from infra.contracts import Tier
from infra.keys import Lane
from infra.states import Status
from tests.worker.conftest import backend as backend
from tests.worker.worker_aids import Backend, checked_log, said, serving, submit, the_end, told_by, undisturbed, until

NUM_JOBS = 40


@pytest.fixture(autouse=True)
def one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker is `pod`, with pid 1."""
    monkeypatch.setattr("socket.gethostname", lambda: "pod")
    monkeypatch.setattr("os.getpid", lambda: 1)


async def test_namesakes_share_the_work_and_nothing_runs_twice(backend: Backend) -> None:
    async with serving(backend), serving(backend):
        records = []
        async with asyncio.timeout(20):
            while len(records := await backend.store.workers("fake")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert len({record.owner for record in records}) == 2
        ids = [await submit(backend.store, f"prompt {number}", max_tokens=30) for number in range(NUM_JOBS)]
        await all_ended_once(backend, ids)
    for job_id in ids:
        assert [event.type for event in await checked_log(backend.store, job_id)].count("job.started") == 1


async def test_a_pool_that_shrinks_mid_job_loses_and_doubles_nothing(backend: Backend, store_url: str) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(serving(backend)) for _ in range(3)]
        ids = [await submit(backend.store, f"prompt {number}", max_tokens=200) for number in range(NUM_JOBS)]
        await until(lambda: all(worker.bridge.attempts for worker in workers))
        workers[0].stopping.tell()
        workers[0].stopping.tell()  # in a hurry: all that runs is handed over
        workers[1].stopping.tell()  # with time: it finishes what it can
        assert await workers[0].served
        await all_ended_once(backend, ids)
        assert await workers[1].served
    if store_url != "memory":
        lane = Lane(await backend.store.open_lane("fake"))
        with redis.Redis.from_url(store_url) as server:
            for tier in Tier:
                if server.exists(lane.stream(tier)):  # and no consumer is left with anything
                    assert server.xpending(lane.stream(tier), "workers")["pending"] == 0
                    assert len(server.xinfo_consumers(lane.stream(tier), "workers")) <= 1


async def all_ended_once(backend: Backend, ids: list[str]) -> None:
    for number, job_id in enumerate(ids):
        job = await the_end(backend.store, job_id)
        assert job.status is Status.SUCCEEDED
        max_tokens = int(job.spec.params["max_tokens"])
        events = await checked_log(backend.store, job_id)
        assert said(told_by(events).values()) == undisturbed(f"prompt {number}", max_tokens=max_tokens)
