"""What becomes of jobs whose clients wait, when their gateway goes: dead, they are cancelled; shut down, they go on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.blobs import Blobs
from infra.contracts import ModelCard
from infra.jobs import RedisJobs
from infra.settings import GatewaySettings
from infra.states import Status
from infra.store import JobStore
from tests.gateway.gateway_aids import ALIAS, Running, serving
from tests.gateway.scripted import FaultyStore, ScriptedWorker, until

CHAT: dict[str, Any] = {"model": ALIAS, "messages": [{"role": "user", "content": "hello"}]}
WATCH_SECONDS = 0.4

PROGRAM = f"""
import sys
from api_gateway.main import run
from infra.settings import GatewaySettings, StoreSettings
settings = GatewaySettings(port=0, shutdown_seconds=1, watch_seconds={WATCH_SECONDS}, default_max_tokens=6)
sys.exit(run(StoreSettings(redis_url=sys.argv[1], blob_url=sys.argv[2]), settings))
"""


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return replace(settings, watch_seconds=WATCH_SECONDS, sweep_seconds=0.1)


@asynccontextmanager
async def gateway_process(redis_url: str, blob_url: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, redis_url, blob_url, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        ready = re.fullmatch(r"gateway ready: (http://\S+)\n", (await process.stdout.readline()).decode())
        assert ready
        yield process, ready[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def statuses(store: JobStore) -> dict[str, Status]:
    return {job.spec.metadata.get("name", job.id): job.status for job in await store.list_jobs("default", limit=10)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_dead_gateways_clients_are_gone_and_a_closed_ones_are_not(
    redis_url: str, tmp_path: Path, card: ModelCard, number: signal.Signals
) -> None:
    store = await RedisJobs.connect(redis_url)
    await store.put_card(card)
    lane = await store.open_lane(ALIAS)
    async with (
        gateway_process(redis_url, tmp_path.as_uri()) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        whole, stream = ({**CHAT, "stream": stream, "metadata": {"name": str(stream)}} for stream in (False, True))
        job = {"model": ALIAS, "input": "x", "metadata": {"name": "background"}}
        asks = [client.post("/v1/chat/completions", json=chat) for chat in (whole, stream)]
        waiting = [asyncio.create_task(ask) for ask in (*asks, client.post("/v1/jobs", json=job))]
        async with asyncio.timeout(20):
            while len(await statuses(store)) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(2 * WATCH_SECONDS)  # their gateway lives: they are watched
        assert (await store.sweep(lane)).cancelled == []
        process.send_signal(number)
        await process.wait()
        await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.sleep(1.2 * WATCH_SECONDS)
    cancelled = (await store.sweep(lane)).cancelled
    ends = Status.CANCELLED if number is signal.SIGKILL else Status.QUEUED
    assert await statuses(store) == {"False": ends, "True": ends, "background": Status.QUEUED}
    assert len(cancelled) == (2 if number is signal.SIGKILL else 0)
    await store.close()


async def test_who_waits_for_long_is_watched_for_as_long(running: Running, worker: ScriptedWorker) -> None:
    """Several watches long, over sweeps of the gateway itself."""
    worker.gate.clear()
    asking = asyncio.create_task(running.client.post("/v1/chat/completions", json=CHAT))
    await until(lambda: bool(worker.claimed))
    await asyncio.sleep(3 * WATCH_SECONDS)
    worker.gate.set()
    assert (await asking).status_code == 200


async def test_a_store_that_is_away_for_a_moment_costs_nobody_his_answer(
    store: JobStore, blobs: Blobs, card: ModelCard, settings: GatewaySettings
) -> None:
    await store.put_card(card)
    faulty: Any = FaultyStore(store, set())
    worker = ScriptedWorker(store, await store.open_lane(ALIAS))
    worker.gate.clear()
    serving_jobs = asyncio.create_task(worker.serve())
    async with serving(faulty, blobs, settings) as running:
        asking = asyncio.create_task(running.client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: bool(worker.claimed))
        faulty.refused.add("watch")
        await asyncio.sleep(WATCH_SECONDS / 2)
        faulty.refused.clear()
        await asyncio.sleep(2 * WATCH_SECONDS)
        worker.gate.set()
        assert (await asking).status_code == 200
    serving_jobs.cancel()
    await asyncio.gather(serving_jobs, return_exceptions=True)


async def test_answered_requests_leave_nothing_behind(running: Running, worker: ScriptedWorker) -> None:
    for _ in range(3):
        assert (await running.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert not running.gateway.foreground._watchers and not running.gateway.foreground._left
