"""Case 35 [celery#5716; rhesis#1769]: the server is at maxmemory, and later has room again.

The kind: a store that refuses writes for a while. Submits get 503, each route its own form of it, never a 202 of which
nothing is recorded; what was accepted ends; and when there is room, all goes on without anybody's help.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from infra.blobs import open_blobs
from infra.embedded import EmbeddedServer
from infra.jobs import RedisJobs
from infra.settings import GatewaySettings
from infra.states import Status
from tests.gateway import gateway_aids
from tests.gateway.gateway_aids import Running
from tests.worker import worker_aids

JOB = {"model": "fake", "input": "hello", "params": {"seed": 7, "max_tokens": 8}}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[tuple[Running, RedisJobs, redis.Redis]]:
    """A gateway and a worker over a server of their own."""
    blobs = open_blobs((tmp_path / "blobs").as_uri())
    with EmbeddedServer(tmp_path / "server") as url, redis.Redis.from_url(url) as server:
        store = await RedisJobs.connect(url)
        backend = worker_aids.Backend(store, lambda: RedisJobs.connect(url), blobs)
        settings = GatewaySettings(shutdown_seconds=2.0, default_max_tokens=8)
        async with worker_aids.serving(backend), gateway_aids.serving(store, blobs, settings) as running:
            yield running, store, server
        await store.close()


async def test_nothing_is_accepted_that_is_not_recorded(house: tuple[Running, RedisJobs, redis.Redis]) -> None:
    running, store, server = house
    slow = {**JOB, "params": {"seed": 7, "max_tokens": 600}}
    before = (await running.client.post("/v1/jobs", json=slow)).json()["id"]
    accepted: list[str] = []
    refused = 0

    async def clients(count: int) -> None:
        nonlocal refused
        for _ in range(count):
            answer = await running.client.post("/v1/jobs", json=JOB)
            if answer.status_code == 202:
                accepted.append(answer.json()["id"])
            else:
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "store_unavailable"
                refused += 1

    loading = asyncio.gather(*(clients(20) for _ in range(4)))
    await asyncio.sleep(0.1)
    server.config_set("maxmemory", 1)  # in the middle of the load
    await loading
    store._has_room_until.clear()
    for route, body in (
        ("/v1/jobs", JOB),
        ("/v1/completions", {"model": "fake", "prompt": "hello"}),
        ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}),
    ):
        answer = await running.client.post(route, json=body)
        assert answer.status_code == 503, (route, answer.text)
    bulk = await running.client.post("/v1/jobs/bulk", json={"jobs": [JOB, JOB]})
    outcomes = [bulk.status_code] if bulk.status_code != 200 else [item["status"] for item in bulk.json()["data"]]
    assert set(outcomes) == {503}
    assert (await running.client.get("/readyz")).status_code == 503
    for job_id in [before, *accepted]:  # all that was accepted is there, and ends, at full memory
        job = await worker_aids.the_end(store, job_id)
        assert job.status is Status.SUCCEEDED
        await worker_aids.checked_log(store, job_id)
    assert refused > 0
    server.config_set("maxmemory", 0)
    async with asyncio.timeout(10):
        while (answer := await running.client.post("/v1/jobs", json=JOB)).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert answer.status_code == 202
    assert (await worker_aids.the_end(store, answer.json()["id"])).status is Status.SUCCEEDED
    assert (await running.client.get("/readyz")).status_code == 200


async def test_a_key_that_was_refused_makes_one_job_later(house: tuple[Running, RedisJobs, redis.Redis]) -> None:
    running, store, server = house
    headers = {"Idempotency-Key": "once"}
    for maxmemory in (1, 0):
        server.config_set("maxmemory", maxmemory)
        store._has_room_until.clear()
        answers = await asyncio.gather(*(running.client.post("/v1/jobs", json=JOB, headers=headers) for _ in range(10)))
        assert {answer.status_code for answer in answers} == ({503} if maxmemory else {202})
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(await store.list_jobs("default", limit=10)) == 1
