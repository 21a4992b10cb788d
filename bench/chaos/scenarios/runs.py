"""Runs of many jobs, while everything that moves them is killed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from bench.chaos.endpoint import endpoint
from bench.chaos.process import Process
from bench.chaos.record import Record
from bench.chaos.yard import Yard


async def exact(yard: Yard) -> Record:
    record = Record(promise="run exact", fault="SIGKILL dispatcher and pipelines, a chunk that fails for good")
    chance = random.Random(9)
    async with yard.site() as site, endpoint() as outside:
        await site.gateway()
        engine = {"fake_poison": "poison", "fake_seconds_per_step": 0.01}
        workers = [await site.worker(engine=engine) for _ in range(2)]
        dispatcher = await site.dispatcher(webhook_allow="127.0.0.1")
        pipelines = await site.pipelines(run_window=4)
        texts = [_text(number, 1200) for number in range(yard.size(2, 8))]
        texts.append(_text(99, 400) + " poison " + _text(98, 400))
        body: dict[str, Any] = {
            "model": "fake", "chunk_tokens": 400, "target_tokens": 24, "fan_in": 3,
            "documents": [{"text": text} for text in texts],
            "webhook": {"url": outside.url("ok/run")},
        }  # fmt: skip
        answer = await site.http.post("/v1/runs/summarize", json=body)
        record.demand(answer.status_code == 202, f"the run was answered by {answer.status_code}: {answer.text[:200]}")
        run_id = answer.json()["id"]
        killed = [0]

        async def disturb() -> None:
            while True:
                await asyncio.sleep(chance.uniform(0.3, 1.0))
                for worker in workers:  # the poison kills them
                    if not worker.is_alive:
                        await worker.start()
                victim: Process = dispatcher if killed[0] % 2 else pipelines
                if killed[0] < yard.size(4, 12):
                    await victim.kill()
                    killed[0] += 1
                    await victim.start()

        disturbing = asyncio.create_task(disturb())
        try:
            async with asyncio.timeout(yard.size(90, 300)):
                while (run := (await site.http.get(f"/v1/runs/{run_id}")).json())["finished_at"] is None:
                    if disturbing.done():
                        disturbing.result()
                    await asyncio.sleep(0.2)
                while not outside.requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        finally:
            disturbing.cancel()
            await asyncio.wait([disturbing])
        counts = run["counts"]
        failures = (await site.http.get(f"/v1/runs/{run_id}/report")).json()["failures"]
        record.demand(killed[0] >= 2, "too little was killed")
        record.demand(counts["chunks"] == counts["chunks_done"] + counts["chunks_failed"], f"chunks: {counts}")
        record.demand(counts["chunks_failed"] == 1, f"{counts['chunks_failed']} chunks failed instead of 1")
        codes = [failure["error"]["code"] for failure in failures]
        record.demand(codes == ["worker_lost"], f"the report names {codes}")
        ids = {request.headers["webhook-id"] for request in outside.requests}
        record.duplicates += len(ids) - 1
        items: dict[str, int] = {}  # child jobs by item: each once
        async with site.redis() as client:
            async for key in client.scan_iter("ms:{*}:job:*", count=1000):
                item = await client.hget(key, "run_item")
                items[repr(item)] = items.get(repr(item), 0) + 1
        record.jobs += sum(items.values())
        record.duplicates += sum(count - 1 for count in items.values())
        record.figures = {
            "chunks": counts["chunks"], "failed by poison": counts["chunks_failed"], "kills": killed[0],
            "child jobs": sum(items.values()), "status": run["status"], "callbacks": len(ids),
        }  # fmt: skip
    return record


def _text(number: int, length: int) -> str:
    """Words of which no two documents share a chunk."""
    words = [f"mill{number}x{position}" for position in range(length // 8)]
    return " ".join(words)
