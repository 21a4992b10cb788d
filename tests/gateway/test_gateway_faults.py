"""The store's server is killed and comes back under an open stream."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from api_gateway.tasks import end
from infra.blobs import Blobs
from infra.contracts import ModelCard
from infra.embedded import EmbeddedServer
from infra.jobs import RedisJobs
from infra.settings import GatewaySettings
from tests.gateway.gateway_aids import ALIAS, Running, serving
from tests.gateway.scripted import ScriptedWorker, text_of, until

JOB = {"model": ALIAS, "input": "hello", "params": {"max_tokens": 20}}


async def follow(running: Running, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with running.client.stream("GET", f"/v1/jobs/{job_id}/events", timeout=60) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
    return found


async def test_a_stream_and_an_answer_go_on_over_a_restart_of_the_store(
    tmp_path: Path, blobs: Blobs, card: ModelCard, settings: GatewaySettings
) -> None:
    server = EmbeddedServer(tmp_path / "server")
    url = server.start()
    try:
        store = await RedisJobs.connect(url)
        await store.put_card(card)
        async with serving(store, blobs, settings) as running:
            job = (await running.client.post("/v1/jobs", json=JOB)).json()
            streaming = asyncio.create_task(follow(running, job["id"]))
            chat = {"model": ALIAS, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
            answering = asyncio.create_task(running.client.post("/v1/chat/completions", json=chat, timeout=60))
            await until(lambda: running.gateway.hub.num_readers == 2)
            await asyncio.sleep(1.2)  # the server writes its log to disk every second
            server.kill()
            assert (await running.client.get("/readyz")).status_code == 503
            refused = await running.client.post("/v1/jobs", json=JOB)
            assert refused.status_code == 503 and refused.headers["x-should-retry"] == "true"
            assert server.start() == url
            own = await RedisJobs.connect(url)
            worker = ScriptedWorker(own, await own.open_lane(ALIAS))
            task = asyncio.create_task(worker.serve())
            events = await streaming
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            texts = [delta["text"] for event in events for delta in event.get("deltas", [])]
            assert "".join(texts) == text_of(20)
            answer = await answering
            assert answer.json()["choices"][0]["message"]["content"] == text_of(3)
            assert (await running.client.get("/readyz")).status_code == 200
            await end(task)
            await own.close()
        await store.close()
    finally:
        server.stop()
