"""A deployment for cases that need real processes: a server, and the commands that operators start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.chaos.site import Site, site
from infra.embedded import bundled_binary

SECONDS = 60.0


@asynccontextmanager
async def deployed(folder: Path) -> AsyncIterator[Site]:
    async with site(folder / "site", bundled_binary(), short=True) as made:
        yield made


async def submit_run(site: Site, documents: list[dict[str, Any]], **fields: Any) -> str:
    """Asks for a summary of `documents`, as a client does; the run's id."""
    body = {"model": "fake", "chunk_tokens": 200, "target_tokens": 12, "fan_in": 3, "documents": documents, **fields}
    answer = await site.http.post("/v1/runs/summarize", json=body)
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def end_of_run(site: Site, run_id: str, *, seconds: float = SECONDS) -> dict[str, Any]:
    """The run's view once it has ended."""
    async with asyncio.timeout(seconds):
        while (run := (await site.http.get(f"/v1/runs/{run_id}")).json())["finished_at"] is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    ended: dict[str, Any] = run
    return ended


async def output_rows(site: Site, run_id: str) -> list[dict[str, Any]]:
    """The run's output, a row a document."""
    answer = await site.http.get(f"/v1/runs/{run_id}/output")
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def times_fed(site: Site) -> dict[tuple[str, str], int]:
    """How many child jobs the store knows by run and item: one each."""
    found: dict[tuple[str, str], int] = {}
    async with site.redis() as client:
        async for key in client.scan_iter("ms:{*}:job:*", count=1000):
            item = await client.hget(key, "run_item")
            if item is not None:
                run_item = repr(item)
                found[("", run_item)] = found.get(("", run_item), 0) + 1
    return found
