"""Health, metrics, autoscaling, documentation, traces, and the process itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from infra.blobs import Blobs
from infra.contracts import ModelCard
from infra.jobs import RedisJobs
from infra.memory import MemoryJobs
from infra.settings import GatewaySettings
from infra.store import JobStore
from infra.telemetry import Telemetry
from tests.gateway.gateway_aids import ALIAS, Running, serving
from tests.gateway.scripted import FaultyStore, ScriptedWorker, until

JOB = {"model": ALIAS, "input": "hello", "params": {"max_tokens": 8}}
SECRET = "canary-7f3a"


async def metrics_of(running: Running) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, these sorted."""
    text = (await running.client.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}


async def test_readiness_follows_the_store_and_the_models(
    store: JobStore, blobs: Blobs, card: ModelCard, settings: GatewaySettings
) -> None:
    async with serving(store, blobs, settings) as running:
        assert (await running.client.get("/healthz")).json() == {"status": "ok"}
        empty = await running.client.get("/readyz")
        assert empty.status_code == 503 and "no model" in empty.json()["reason"]
    await store.put_card(card)
    faulty = FaultyStore(store, set())
    async with serving(faulty, blobs, settings) as running:
        assert (await running.client.get("/readyz")).status_code == 200
        faulty.refused.add("ping")
        assert (await running.client.get("/readyz")).status_code == 503
        assert (await running.client.get("/healthz")).status_code == 200


async def test_metrics_tell_of_the_queue(running: Running, store: JobStore) -> None:
    for tier in ("bulk", "bulk", "interactive"):
        await running.client.post("/v1/jobs", json={**JOB, "tier": tier})
    await running.client.get("/v1/jobs/none")
    found = await metrics_of(running)
    lane = str(await store.open_lane(ALIAS))
    assert found["millstream_lane_depth", lane, "bulk", ALIAS] == 2
    assert found["millstream_lane_depth", lane, ALIAS, "interactive"] == 1
    assert found["millstream_backlog_seconds", ALIAS] >= 3
    assert found["millstream_jobs_admitted_total", "bulk", ALIAS] == 2
    assert found["millstream_http_requests_total", "/v1/jobs", "202", "POST"] == 3
    assert found["millstream_http_requests_total", "/v1/jobs/{job_id}", "404", "GET"] == 1
    assert found["millstream_event_streams_open",] == 0


async def test_who_is_refused_before_any_route_is_counted_by_the_status_told(
    store: JobStore, blobs: Blobs, card: ModelCard, settings: GatewaySettings
) -> None:
    await store.put_card(card)
    async with serving(store, blobs, replace(settings, api_keys="one")) as running:
        assert (await running.client.post("/v1/jobs", json=JOB)).status_code == 401
        assert (await metrics_of(running))["millstream_http_requests_total", "/v1/jobs", "401", "POST"] == 1


async def test_open_streams_are_counted(running: Running) -> None:
    job = (await running.client.post("/v1/jobs", json=JOB)).json()
    async with running.client.stream("GET", f"/v1/jobs/{job['id']}/events"):
        assert (await metrics_of(running))["millstream_event_streams_open",] == 1
    await until(lambda: running.gateway.hub.num_readers == 0)
    assert (await metrics_of(running))["millstream_event_streams_open",] == 0


async def test_the_scaling_signal_is_zero_only_without_work(running: Running, store: JobStore) -> None:
    idle = (await running.client.get(f"/internal/scale/{ALIAS}")).json()
    assert idle["backlog_seconds"] == 0 and idle["queued"] == 0
    job = (await running.client.post("/v1/jobs", json=JOB)).json()
    waiting = (await running.client.get(f"/internal/scale/{ALIAS}")).json()
    assert waiting["backlog_seconds"] > 0 and (waiting["queued"], waiting["running"]) == (1, 0)
    claim = await store.claim(await store.open_lane(ALIAS), "w", free_tokens=None, lease_seconds=30)
    assert claim is not None
    busy = (await running.client.get(f"/internal/scale/{ALIAS}")).json()
    assert busy["backlog_seconds"] > 0 and (busy["queued"], busy["running"]) == (0, 1)
    await running.client.post(f"/v1/jobs/{job['id']}/cancel")
    assert (await running.client.get(f"/internal/scale/{ALIAS}")).json()["backlog_seconds"] == 0


async def test_measured_rates_give_an_eta(running: Running, store: JobStore, card: ModelCard) -> None:
    import msgspec

    await store.put_card(msgspec.structs.replace(card, prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0))
    body = {**JOB, "input": [1] * 50, "params": {"max_tokens": 20}}
    ids = [(await running.client.post("/v1/jobs", json=body)).json()["id"] for _ in range(3)]
    running.gateway.cards._read_at = float("-inf")
    etas = [(await running.client.get(f"/v1/jobs/{job_id}")).json()["queue"]["eta_seconds"] for job_id in ids]
    assert etas == [0.5, 3.0, 5.5]  # each job ahead: 50 / 100 + 20 / 10 seconds; its own prompt: 0.5
    scale = (await running.client.get(f"/internal/scale/{ALIAS}")).json()
    assert scale["backlog_seconds"] == 7.5
    body["deadline"] = 0.2 + __import__("time").time()
    late = await running.client.post("/v1/jobs", json=body)
    assert late.status_code == 422 and "earliest" in late.json()["error"]["message"]


async def test_a_paused_lane_takes_jobs_and_runs_none(running: Running, worker: ScriptedWorker) -> None:
    paused = await running.client.post(f"/internal/lanes/{worker.lane}/pause")
    assert paused.json() == {"lane": worker.lane, "paused": True}
    job = (await running.client.post("/v1/jobs", json=JOB, headers={"Prefer": "wait=1"})).json()
    assert job["status"] == "queued"
    assert (await metrics_of(running))["millstream_lane_paused", str(worker.lane), ALIAS] == 1
    await running.client.post(f"/internal/lanes/{worker.lane}/resume")
    job = (await running.client.get(f"/v1/jobs/{job['id']}", params={"wait": 20})).json()
    assert job["status"] == "succeeded"


async def test_the_gateway_ends_what_is_past_its_time(
    store: JobStore, blobs: Blobs, card: ModelCard, settings: GatewaySettings
) -> None:
    await store.put_card(card)
    async with serving(store, blobs, replace(settings, sweep_seconds=0.1)) as running:
        body = {**JOB, "queue_ttl": 0.05}
        job = (await running.client.post("/v1/jobs", json=body, headers={"Prefer": "wait=20"})).json()
        assert job["status"] == "expired"


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert tag not in ("script", "iframe", "img", "link"), tag
        self.targets += [named["href"] or ""] if "href" in named else []
        self.ids |= {named["id"] or ""} if "id" in named else set()


async def test_the_documentation_covers_every_route_and_needs_nothing_from_elsewhere(running: Running) -> None:
    document = (await running.client.get("/openapi.json")).json()
    paths = document["paths"]
    assert {"/v1/jobs", "/v1/jobs/{job_id}/events", "/v1/chat/completions", "/v1/runs/summarize"} <= paths.keys()
    request = paths["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert request["$ref"].endswith("JobRequest")
    assert {"model", "input", "params", "tier"} <= document["components"]["schemas"]["JobRequest"]["properties"].keys()
    refusal = paths["/v1/jobs"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    assert refusal["$ref"].endswith("ErrorBody")
    page = await running.client.get("/", follow_redirects=True)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    links = Links()
    links.feed(page.text)
    assert all(target == "/openapi.json" or target[1:] in links.ids for target in links.targets)
    assert all(path in page.text for path in paths)


async def test_one_trace_from_the_caller_to_the_job_and_no_text_in_it(
    blobs: Blobs, card: ModelCard, settings: GatewaySettings, caplog: Any
) -> None:
    store = MemoryJobs()
    await store.put_card(card)
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.start("gateway", exporter=exporter)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with serving(store, blobs, settings, telemetry=telemetry) as running:
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        job = (await running.client.post("/v1/jobs", json={**JOB, "input": SECRET}, headers=headers)).json()
        await running.client.post("/v1/jobs", json={**JOB, "input": SECRET, "params": {"top_p": 0}}, headers=headers)
        await running.client.get("/v1/jobs/none", headers={"traceparent": "broken"})
        metrics = (await running.client.get("/metrics")).text
    telemetry.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    sent, request = spans[f"text_completion {ALIAS}"], spans["POST /v1/jobs"]
    record = await store.get(job["id"])
    assert record is not None and record.traceparent is not None
    assert sent.parent is not None and request.parent is not None
    assert f"{request.parent.span_id:016x}" == parent and f"{request.context.trace_id:032x}" == trace
    assert sent.context.trace_id == request.context.trace_id
    assert record.traceparent.split("-")[1:3] == [trace, f"{sent.context.span_id:016x}"]
    assert sent.attributes is not None and sent.attributes["gen_ai.request.model"] == ALIAS
    assert spans["GET /v1/jobs/{job_id}"].attributes["http.response.status_code"] == 404
    told = metrics + caplog.text + "".join(span.to_json() for span in exporter.get_finished_spans())
    assert SECRET not in told


async def test_the_callers_context_is_handed_on_without_telemetry(running: Running, store: JobStore) -> None:
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    job = (await running.client.post("/v1/jobs", json=JOB, headers={"traceparent": context})).json()
    record = await store.get(job["id"])
    assert record is not None and record.traceparent == context
    job = (await running.client.post("/v1/jobs", json=JOB, headers={"traceparent": "00-0-0-01"})).json()
    record = await store.get(job["id"])
    assert record is not None and record.traceparent is None


PROGRAM = """
import sys
from api_gateway.main import run
from infra.settings import GatewaySettings, StoreSettings
code = run(StoreSettings(redis_url=sys.argv[1], blob_url=sys.argv[2]), GatewaySettings(port=0, shutdown_seconds=3))
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(code)
"""


async def test_the_process_serves_until_it_is_told_to_stop(redis_url: str, tmp_path: Path, card: ModelCard) -> None:
    """SIGTERM with twenty open streams: it ends within its grace, with code 0, and the jobs are still there."""
    store = await RedisJobs.connect(redis_url)
    await store.put_card(card)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, redis_url, tmp_path.as_uri(), stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    try:
        ready = re.fullmatch(r"gateway ready: (http://\S+)\n", (await process.stdout.readline()).decode())
        assert ready
        async with httpx.AsyncClient(base_url=ready[1], limits=httpx.Limits(max_connections=None)) as client:
            ids = [(await client.post("/v1/jobs", json=JOB)).json()["id"] for _ in range(20)]
            first_frames = 0

            async def follow(job_id: str) -> str:
                nonlocal first_frames
                text = ""
                async with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
                    async for piece in answer.aiter_text():
                        text += piece
                        first_frames += 1
                return text

            streams = [asyncio.create_task(follow(job_id)) for job_id in ids]
            await until(lambda: first_frames >= 20)
            process.send_signal(signal.SIGTERM)
            texts = await asyncio.gather(*streams)
            assert all(json.loads(text.split("data: ")[1].split("\n")[0])["type"] == "job.queued" for text in texts)
        assert await asyncio.wait_for(process.wait(), 10) == 0, (await process.stderr.read()).decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for job_id in ids:
        job = await store.get(job_id)
        assert job is not None and job.status == "queued"
    await store.close()


async def test_a_process_that_cannot_serve_says_why(tmp_path: Path, redis_url: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for url, port_setting, words in (
            ("redis://127.0.0.1:1/0", 0, "store"),
            (redis_url, port, "choose another --port"),
        ):
            program = PROGRAM.replace("port=0", f"port={port_setting}")
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, url, tmp_path.as_uri(), stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            )  # fmt: skip
            _, errors = await process.communicate()
            assert process.returncode == 1
            assert words in errors.decode() and "Traceback" not in errors.decode()
