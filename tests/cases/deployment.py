"""A deployment for cases that need real processes: a server, and the commands that operators start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.chaos.endpoint import Endpoint
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


async def times_fed(site: Site) -> dict[str, int]:
    """How many child jobs the store knows by run and item: one each."""
    found: dict[str, int] = {}
    async with site.redis() as client:
        async for key in client.scan_iter("ms:{*}:job:*", count=1000):
            item = await client.hget(key, "run_item")
            if item is not None:
                found[repr(item)] = found.get(repr(item), 0) + 1
    return found


def telemetry_to(port: int) -> dict[str, str]:
    """Variables that send traces to a collector of this machine."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}/ok",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    }


@dataclass(frozen=True)
class SeenSpan:
    """A span as the collector got it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    is_ended: bool
    attributes: dict[str, str]


def spans_of(collector: Endpoint) -> list[SeenSpan]:
    """All that have arrived."""
    found = []
    for request in collector.requests:
        sent = ExportTraceServiceRequest.FromString(request.body)
        for group in (scope for resource in sent.resource_spans for scope in resource.scope_spans):
            found += [
                SeenSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    is_ended=span.end_time_unix_nano >= span.start_time_unix_nano > 0,
                    attributes={each.key: each.value.string_value for each in span.attributes},
                )
                for span in group.spans
            ]
    return found
