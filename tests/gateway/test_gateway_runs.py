"""Runs over HTTP: what the gateway admits, and how it shows it. What runs do is tested with their steps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest

from infra.blobs import Blobs
from infra.contracts import JobError, ModelCard
from infra.memory import MemoryJobs
from infra.runs import DocumentUpdate, Written
from infra.runs.memory import MemoryRuns
from infra.settings import GatewaySettings
from infra.states import Status
from tests.gateway.gateway_aids import ALIAS, Running, serving

BODY = {
    "model": ALIAS,
    "style": "bullets",
    "documents": [{"id": "a", "name": "A.txt", "text": "Some text. 🙂"}, {"uri": "file:///b.txt"}, {"text": ""}],
    "metadata": {"k": "v"},
}


@pytest.fixture
def runs() -> MemoryRuns:
    return MemoryRuns()


@pytest.fixture
async def serving_runs(
    blobs: Blobs, card: ModelCard, settings: GatewaySettings, runs: MemoryRuns
) -> AsyncIterator[Running]:
    store = MemoryJobs()
    await store.put_card(card)
    async with serving(store, blobs, replace(settings, api_keys="one,two"), runs=runs) as running:
        running.client.headers["authorization"] = "Bearer one"
        yield running


async def test_a_run_is_admitted_with_its_texts_in_blobs(serving_runs: Running, runs: MemoryRuns, blobs: Blobs) -> None:
    answer = await serving_runs.client.post("/v1/runs/summarize", json=BODY)
    assert answer.status_code == 202
    run = answer.json()
    assert answer.headers["location"] == f"/v1/runs/{run['id']}"
    assert run["status"] == "queued" and run["params"]["style"] == "bullets" and run["metadata"] == {"k": "v"}
    assert [(one["id"], one["name"]) for one in run["documents"]] == [("a", "A.txt"), ("1", "1"), ("2", "2")]
    documents = await runs.documents(run["id"], [0, 1, 2])
    sources = [document.source for document in documents]
    assert sources[0].blob is not None and blobs.get(sources[0].blob).decode() == "Some text. 🙂"
    assert sources[1].uri == "file:///b.txt" and sources[1].blob is None
    assert sources[2].blob is not None and blobs.get(sources[2].blob) == b""
    header = await runs.header(run["id"])
    assert header is not None and header.run.salt
    assert await runs.take_due(limit=5, hide_seconds=1) == [run["id"]]  # somebody will look at it


async def test_a_run_is_shown_cancelled_and_reported(serving_runs: Running, runs: MemoryRuns) -> None:
    run = (await serving_runs.client.post("/v1/runs/summarize", json=BODY)).json()
    [document] = await runs.documents(run["id"], [2])
    error = JobError(code="empty_document", message="there is no text in it")
    state = msgspec.structs.replace(document.state, status=Status.FAILED, error=error, num_bytes=0)
    assert await runs.update(run["id"], DocumentUpdate(number=2, state=state), window=4) is Written.YES
    shown = (await serving_runs.client.get(f"/v1/runs/{run['id']}")).json()
    assert shown["status"] == "running" and shown["counts"]["documents_failed"] == 1
    assert shown["documents"][2]["error"]["code"] == "empty_document"
    assert shown["documents"][2]["error"]["type"] == "invalid_request_error"
    output = await serving_runs.client.get(f"/v1/runs/{run['id']}/output")
    assert output.status_code == 404 and output.json()["error"]["code"] == "output_not_found"
    for _ in range(2):
        cancelled = (await serving_runs.client.post(f"/v1/runs/{run['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
    report = (await serving_runs.client.get(f"/v1/runs/{run['id']}/report")).json()
    assert report["counts"]["documents"] == 3
    assert report["document_errors"]["2"]["code"] == "empty_document"


async def test_the_same_key_is_the_same_run(serving_runs: Running) -> None:
    headers = {"Idempotency-Key": "k"}
    first = await serving_runs.client.post("/v1/runs/summarize", json=BODY, headers=headers)
    again = await serving_runs.client.post("/v1/runs/summarize", json=BODY, headers=headers)
    other = await serving_runs.client.post("/v1/runs/summarize", json={**BODY, "style": "headline"}, headers=headers)
    assert first.json()["id"] == again.json()["id"]
    assert other.status_code == 422


async def test_runs_of_others_and_bad_ones(serving_runs: Running) -> None:
    run_id = (await serving_runs.client.post("/v1/runs/summarize", json=BODY)).json()["id"]
    for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/report"), ("GET", "/output")):
        for headers in ({"authorization": "Bearer two"}, {}):
            wanted = run_id if headers else "run-0123456789ab"
            answer = await serving_runs.client.request(method, f"/v1/runs/{wanted}{path}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "run_not_found"), path
    for change, status, param in (
        ({"model": "nobody"}, 404, "model"),
        ({"documents": []}, 400, "documents"),
        ({"documents": [{}]}, 400, "documents[0]"),
        ({"documents": [{"text": "x", "uri": "file:///x"}]}, 400, "documents[0]"),
        ({"documents": [{"uri": "http://x/"}]}, 400, "documents[0].uri"),
        ({"documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]}, 400, "documents[1].id"),
        ({"documents": [{"txt": "x"}]}, 400, "documents[0].txt"),
        ({"style": "haiku"}, 400, "style"),
        ({"fan_in": 1}, 400, "fan_in"),
        ({"target_tokens": 0}, 400, "target_tokens"),
        ({"chunk_tokens": 100, "overlap_tokens": 90}, 400, "overlap_tokens"),
        ({"webhook": {"url": "https://example.com", "events": ["job.failed"]}}, 400, "webhook.events"),
        ({"tier": "gold"}, 400, "tier"),
    ):
        answer = await serving_runs.client.post("/v1/runs/summarize", json={**BODY, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
