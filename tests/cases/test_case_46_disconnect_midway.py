"""otel-contrib #609, otel-python #2606: a client that leaves midway leaves spans that never end, and errors in the log.

Kind: requests that end otherwise than by their answer. With a `traceparent` coming in there is one trace, every span of
it is ended, and the logs hold no error: for a stream cut short, one heard to its end, and a request that is refused.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.endpoint import endpoint
from bench.chaos.site import Site
from tests.cases.deployment import deployed, spans_of, telemetry_to

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "tell me"}], "stream": True}


def traceparent(number: int) -> str:
    return f"00-{number:032x}-{number:016x}-01"


async def leave_midway(site: Site) -> None:
    body, headers = CHAT | {"max_tokens": 800}, {"traceparent": traceparent(1)}
    async with site.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_bytes():
            return


async def test_one_trace_of_ended_spans_and_clean_logs(tmp_path: Path) -> None:
    async with deployed(tmp_path) as site, endpoint() as collector:
        site.environment = telemetry_to(collector.port)
        gateway = await site.gateway()
        worker = await site.worker(engine={"fake_seconds_per_step": 0.005})
        await leave_midway(site)
        whole = await site.http.post(
            "/v1/chat/completions", json=CHAT | {"max_tokens": 4}, headers={"traceparent": traceparent(2)}
        )
        assert whole.text.rstrip().endswith("[DONE]")
        refused = await site.http.post(
            "/v1/chat/completions", json=CHAT | {"temperature": -1}, headers={"traceparent": traceparent(3)}
        )
        assert refused.status_code == 400
        async with asyncio.timeout(30):
            while await site.unfinished():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        jobs = (await site.http.get("/v1/jobs")).json()["data"]
        assert sorted(job["status"] for job in jobs) == ["cancelled", "succeeded"]
        assert [await worker.stop(), await gateway.stop()] == [0, 0]
        spans = spans_of(collector)
        assert all(span.is_ended for span in spans)
        for number, names in ((1, {"process fake"}), (2, {"process fake"}), (3, set[str]())):
            trace = [span for span in spans if int(span.trace_id, 16) == number]
            assert names <= {span.name for span in trace}, (number, trace)
            known = {span.span_id for span in trace} | {f"{number:016x}"}
            assert all(span.parent_id in known for span in trace), trace
        assert {int(span.trace_id, 16) for span in spans if span.name == "process fake"} == {1, 2}
        noise = [
            line for line in site.output.splitlines() if line.startswith(("ERROR", "Traceback", "WARNING opentel"))
        ]
        assert noise == []


async def test_a_broken_traceparent_is_a_trace_of_its_own(tmp_path: Path) -> None:
    async with deployed(tmp_path) as site, endpoint() as collector:
        site.environment = telemetry_to(collector.port)
        gateway, worker = await site.gateway(), await site.worker()
        for broken in ("", "00-0-0-00", f"00-{0:032x}-{0:016x}-01", "é" * 55, "x" * 5000):
            headers = httpx.Headers([("traceparent", broken.encode("latin-1"))])  # type: ignore[list-item]
            answer = await site.http.post(
                "/v1/jobs", json={"model": "fake", "input": "x", "params": {"max_tokens": 2}}, headers=headers
            )
            assert answer.status_code == 202, answer.text
        async with asyncio.timeout(30):
            while await site.unfinished():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert [await worker.stop(), await gateway.stop()] == [0, 0]
        traces = {span.trace_id for span in spans_of(collector) if span.name == "process fake"}
        assert len(traces) == 5
