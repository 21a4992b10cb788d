"""uvicorn PR #2829: SIGTERM with 20 open streams hangs, or takes the work with it.

Kind: a gateway that goes while clients listen. It ends within its grace, the jobs go on, and every stream is resumed
elsewhere behind its last event; background jobs, foreground streams and answers that are waited for alike.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.site import Site
from tests.cases.deployment import deployed

NUM_STREAMS = 20
SLOW = {"fake_seconds_per_step": 0.02, "max_num_seqs": 32, "num_kv_blocks": 2048}


async def test_streams_go_on_behind_another_gateway(tmp_path: Path) -> None:
    async with deployed(tmp_path) as site:
        first = await site.gateway(shutdown_seconds=2.0)
        await site.worker(engine=SLOW)
        ledger = Ledger(site.http, Reference())
        ids = [
            await ledger.submit_until_accepted(*asks.long(number, max_tokens=200)) for number in range(NUM_STREAMS)
        ]  # fmt: skip
        listening = [asyncio.create_task(_until_cut(site, job_id)) for job_id in ids]
        async with asyncio.timeout(30):
            while not all([await ledger.attempts(job_id) for job_id in ids]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        first.send(signal.SIGTERM)
        assert await first.ended(seconds=15) == 0
        heads = await asyncio.gather(*listening)
        assert all(heads), "a stream had shown nothing: it was not open"
        assert not any(event["type"] == "job.succeeded" for events in heads for event in events)
        await site.gateway()
        for job_id, head in zip(ids, heads, strict=True):
            last = head[-1]["sequence_number"]
            rest = [event async for event in ledger.follow(job_id, starting_after=last)]
            numbers = [event["sequence_number"] for event in head + rest]
            assert numbers == list(range(len(numbers)))
            assert rest[-1]["type"] == "job.succeeded"
        record = Record(promise="", fault="")
        await ledger.settle(record, seconds=60)
        assert record.is_kept, record
        assert {audit.attempts for audit in ledger.audits.values()} == {1}


async def _until_cut(site: Site, job_id: str) -> list[dict[str, Any]]:
    """The events that came before the connection ended, by whatever end."""
    events: list[dict[str, Any]] = []
    try:
        async with site.http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and "sequence_number" in (event := json.loads(line[6:])):
                    events.append(event)
    except httpx.TransportError:
        pass
    return events


async def test_foreground_answers_are_jobs_that_go_on(tmp_path: Path) -> None:
    """Clients of the OpenAI-compatible routes hear no end, and find the whole answer under the job's id."""
    async with deployed(tmp_path) as site:
        first = await site.gateway(shutdown_seconds=1.0)
        await site.worker(engine=SLOW)
        params: dict[str, Any] = {"max_tokens": 150, "temperature": 1.0, "seed": 3}

        async def ask(number: int, *, stream: bool) -> None:
            body = {"model": "fake", "prompt": f"{number} in the foreground", "stream": stream, **params}
            try:
                answer = await site.http.post("/v1/completions", json=body)
                assert answer.status_code in (200, 503), answer.text
            except httpx.TransportError:
                pass

        asking = [asyncio.create_task(ask(number, stream=number % 2 == 0)) for number in range(6)]
        async with asyncio.timeout(30):
            while len((await site.http.get("/v1/jobs")).json()["data"]) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        first.send(signal.SIGTERM)
        assert await first.ended(seconds=15) == 0
        await asyncio.gather(*asking)
        await site.gateway()
        jobs = (await site.http.get("/v1/jobs")).json()["data"]
        reference = Reference()
        async with asyncio.timeout(30):
            for job in jobs:
                while (view := (await site.http.get(f"/v1/jobs/{job['id']}?wait=5")).json())["status"] in (
                    "queued",
                    "running",
                ):
                    pass
                assert view["status"] == "succeeded", view
        expected = sorted(reference.tokens(f"{number} in the foreground", params) for number in range(6))
        views = [(await site.http.get(f"/v1/jobs/{job['id']}")).json() for job in jobs]
        assert sorted([choice["token_ids"] for choice in view["result"]["choices"]] for view in views) == expected
