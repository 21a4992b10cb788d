"""How many commands the store gets for a token, from the submit to the last event at the client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench.commands import counted
from infra.blobs import open_blobs
from infra.jobs import RedisJobs
from infra.settings import GatewaySettings
from tests.gateway.gateway_aids import serving
from tests.gateway.test_gateway_full_stack import worker_process

BAR = 0.05  # commands a token, the gateway's reads included
BATCH, TOKENS = 64, 512


async def test_a_token_of_a_full_batch_costs_a_twentieth_of_a_command(redis_url: str, tmp_path: Path) -> None:
    body = {"model": "fake", "input": "count", "params": {"max_tokens": TOKENS, "ignore_eos": True}}
    blobs = (tmp_path / "blobs").as_uri()
    store = await RedisJobs.connect(redis_url)

    async def follow(client: Any) -> int:
        job = (await client.post("/v1/jobs", json=body)).json()
        num_events = 0
        async with client.stream("GET", f"/v1/jobs/{job['id']}/events") as answer:
            async for line in answer.aiter_lines():
                num_events += line.startswith("event: ")
        assert (await client.get(f"/v1/jobs/{job['id']}")).json()["status"] == "succeeded"
        return num_events

    async with (
        serving(store, open_blobs(blobs), GatewaySettings(port=0)) as running,
        worker_process(redis_url, blobs, fake_seconds_per_step=0.01, max_num_seqs=BATCH),
        running.api() as client,
        counted(redis_url) as counts,
    ):
        events = await asyncio.gather(*(follow(client) for _ in range(BATCH)))
    await store.close()
    assert min(events) > 10  # they were streamed, not told at the end
    per_token = counts.total() / (BATCH * TOKENS)
    assert per_token < 0.9 * BAR, f"{per_token:.4f} commands a token: {counts.most_common(12)}"
    print(f"{per_token:.4f} commands a token: {counts.most_common(12)}, {sum(events)} events")
