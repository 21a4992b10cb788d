"""Idempotency keys, and callers' keys."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from api_gateway.auth import Caller, Keyring, Operators
from api_gateway.errors import NotLocal, NotOperator
from api_gateway.main import run
from infra.blobs import Blobs
from infra.contracts import ModelCard
from infra.settings import GatewaySettings, StoreSettings
from infra.store import JobStore
from tests.gateway.gateway_aids import ALIAS, Running, serving
from tests.gateway.scripted import FaultyStore, ScriptedWorker

JOB = {"model": ALIAS, "input": "hello"}


async def test_the_same_key_and_body_is_the_same_job(
    running: Running, more_gateways: Callable[[], Any], store: JobStore
) -> None:
    other = await more_gateways()
    headers = {"Idempotency-Key": "abc"}
    answers = await asyncio.gather(
        *((running, other)[turn % 2].client.post("/v1/jobs", json=JOB, headers=headers) for turn in range(50))
    )
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(await store.list_jobs("default", limit=10)) == 1
    assert len({answer.json()["params"]["seed"] for answer in answers}) == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) >= 1
    quoted = await running.client.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": '"abc"'})
    assert quoted.json()["id"] == answers[0].json()["id"]
    assert quoted.headers["idempotent-replayed"] == "true"


async def test_another_body_or_route_is_not(running: Running, worker: ScriptedWorker) -> None:
    headers = {"Idempotency-Key": "abc"}
    await running.client.post("/v1/jobs", json=JOB, headers=headers)
    other = await running.client.post("/v1/jobs", json={**JOB, "input": "other"}, headers=headers)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    completion = {"model": ALIAS, "prompt": "hello", "max_tokens": 2}
    first = await running.client.post("/v1/completions", json=completion, headers=headers)
    again = await running.client.post("/v1/completions", json=completion, headers=headers)
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    several = {"model": ALIAS, "prompt": ["a", "b", "c"], "max_tokens": 2}
    ids = []
    for _ in range(2):
        headers = {"Idempotency-Key": "several"}
        ids.append((await running.client.post("/v1/completions", json=several, headers=headers)).json())
    assert ids[0] == ids[1]
    assert len(worker.claimed) == 5 and len(set(worker.claimed)) == 5


async def test_a_refused_request_uses_no_key(running: Running) -> None:
    headers = {"Idempotency-Key": "abc"}
    assert (await running.client.post("/v1/jobs", json={**JOB, "input": ""}, headers=headers)).status_code == 400
    assert (await running.client.post("/v1/jobs", json=JOB, headers=headers)).status_code == 202


async def test_malformed_keys(running: Running) -> None:
    for key in ("", '""', "x" * 256, "a\tb"):
        answer = await running.client.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": key})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "Idempotency-Key", key
    assert (await running.client.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": "x" * 255})).status_code == 202


async def test_a_claim_without_a_job_is_completed(running: Running, store: JobStore) -> None:
    """The first gateway died between the claim and the submit."""
    body = b'{"model": "echo", "input": "hello"}'
    job_id = f"job-{await store.open_lane(ALIAS)}-0123456789abcdef"
    fingerprint, digest = hashlib.sha256(body).hexdigest(), hashlib.sha256(b"abc").hexdigest()
    assert await store.claim_key("default", "POST /v1/jobs", digest, fingerprint, job_id) == job_id
    answer = await running.client.post("/v1/jobs", content=body, headers={"Idempotency-Key": "abc"})
    assert answer.status_code == 202 and answer.json()["id"] == job_id


async def test_a_store_that_refuses_writes_is_a_503_and_the_key_completes_it_later(
    store: JobStore, blobs: Blobs, card: ModelCard, settings: GatewaySettings
) -> None:
    await store.put_card(card)
    refusing = FaultyStore(store, {"submit"})
    async with serving(refusing, blobs, settings) as running:  # type: ignore[arg-type]
        answer = await running.client.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "store_unavailable"
        assert answer.headers["retry-after"] == "1" and answer.headers["x-should-retry"] == "true"
        assert await store.list_jobs("default", limit=1) == []
        refusing.refused.clear()
        answer = await running.client.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 202
    assert len(await store.list_jobs("default", limit=5)) == 1


async def test_a_full_queue_is_a_429_with_retry_after(
    store: JobStore, blobs: Blobs, card: ModelCard, settings: GatewaySettings
) -> None:
    await store.put_card(card)
    async with serving(store, blobs, replace(settings, max_queue_length=3)) as running:
        answers = [await running.client.post("/v1/jobs", json=JOB) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [202, 202, 202, 429, 429]
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert answers[-1].headers["x-should-retry"] == "true"
        assert answers[-1].json()["error"]["type"] == "rate_limit_error"
        # A request of several prompts is admitted as a whole or not at all.
        await running.client.post(f"/v1/jobs/{answers[1].json()['id']}/cancel")
        several = {"model": ALIAS, "prompt": ["a", "b", "c"]}
        assert (await running.client.post("/v1/completions", json=several)).status_code == 429
        statuses = [job.status for job in await store.list_jobs("default", limit=9)]
        assert sorted(statuses) == ["cancelled", "cancelled", "queued", "queued"]
        # What was admitted before is found by its key, full or not.
        await running.client.post(f"/v1/jobs/{answers[0].json()['id']}/cancel")
        headers = {"Idempotency-Key": "k"}
        first = await running.client.post("/v1/jobs", json=JOB, headers=headers)
        again = await running.client.post("/v1/jobs", json=JOB, headers=headers)
        assert first.status_code == again.status_code == 202
        assert first.json()["id"] == again.json()["id"]


async def test_keys_make_tenants(store: JobStore, blobs: Blobs, card: ModelCard, settings: GatewaySettings) -> None:
    await store.put_card(card)
    async with serving(store, blobs, replace(settings, api_keys="one, two")) as running:
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "Basic one"},
            {"Authorization": "one"},
        ):
            answer = await running.client.post("/v1/jobs", json=JOB, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
            assert "three" not in answer.text
        one = running.api(headers={"Authorization": "Bearer one"})
        two = running.api(headers={"Authorization": "bearer two"})
        job = (await one.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": "k"})).json()
        for method, path in (
            ("GET", ""),
            ("GET", "/events"),
            ("GET", "/timeline"),
            ("POST", "/cancel"),
            ("DELETE", ""),
        ):
            answer = await two.request(method, f"/v1/jobs/{job['id']}{path}")
            assert answer.status_code == 404, path
        assert (await one.get(f"/v1/jobs/{job['id']}")).status_code == 200
        assert (await two.get("/v1/jobs")).json()["data"] == []
        assert len((await one.get("/v1/jobs")).json()["data"]) == 1
        # Idempotency keys are each tenant's own, and so is the cache.
        theirs = (await two.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": "k"})).json()
        assert theirs["id"] != job["id"]
        records = [await store.get(each["id"]) for each in (job, theirs)]
        assert records[0] is not None and records[1] is not None
        assert records[0].spec.salt != records[1].spec.salt
        for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", f"/internal/scale/{ALIAS}"):
            assert (await running.client.get(path)).status_code == 200, path
        await one.aclose()
        await two.aclose()


async def test_lanes_are_paused_by_admin_keys_alone(
    store: JobStore, blobs: Blobs, card: ModelCard, settings: GatewaySettings
) -> None:
    await store.put_card(card)
    lane = await store.open_lane(ALIAS)
    guarded = replace(settings, api_keys="one", admin_keys="root, other")
    async with serving(store, blobs, guarded) as running:
        for change in ("pause", "resume"):
            path = f"/internal/lanes/{lane}/{change}"
            answers = [
                (await running.client.post(path, headers={} if key is None else {"Authorization": f"Bearer {key}"}))
                for key in (None, "one", "wrong", "root", "other")
            ]
            assert [answer.status_code for answer in answers] == [401, 403, 403, 200, 200]
            assert answers[1].json()["error"]["code"] == "not_operator"
            assert (await store.load(lane)).paused is (change == "pause")
        admin = {"Authorization": "Bearer root"}
        assert (await running.client.get("/v1/jobs", headers=admin)).status_code == 401  # no tenant's key


def test_without_admin_keys_only_this_machine_pauses() -> None:
    operators = Operators.from_settings(" , ")
    operators.check("Bearer one", Caller("127.0.0.1", "localhost:8080"))
    for elsewhere in (Caller("10.0.0.1", "localhost"), Caller("127.0.0.1", "llm.example.org")):
        with pytest.raises(NotOperator):
            operators.check("Bearer one", elsewhere)


def test_cache_domains_cannot_be_named_by_callers() -> None:
    keyring = Keyring.from_settings("one,two", "")
    domains = {
        keyring.cache_domain("a"),
        keyring.cache_domain("b"),
        keyring.cache_domain("a", "b"),
        keyring.cache_domain("ab"),
        keyring.cache_domain("", "a"),
        Keyring.from_settings("one,three", "").cache_domain("a"),
        Keyring.from_settings("one,two", "secret").cache_domain("a"),
    }
    assert len(domains) == 7
    assert Keyring.from_settings(" two , one", "").cache_domain("a") == keyring.cache_domain("a")


def test_without_keys_only_this_machine_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    keyring = Keyring.from_settings("", "")
    for local in (
        Caller("127.0.0.1"),
        Caller("::1", "localhost:8080"),
        Caller(None, "[::1]:80", "http://127.0.0.1:3000"),
        Caller("127.0.0.9", "127.0.0.1", "http://localhost"),
    ):
        assert keyring.tenant_of("Bearer x", local) == "default"
    for elsewhere in (
        Caller("192.0.2.7"),
        Caller("127.0.0.1", "evil.example:8080"),  # a name bent to point here
        Caller("127.0.0.1", "localhost", "https://evil.example"),  # a page that a browser shows
        Caller("127.0.0.1", "localhost", "null"),
        Caller("127.0.0.1", "localhost.evil.example"),
    ):
        with pytest.raises(NotLocal):
            keyring.tenant_of("Bearer x", elsewhere)
    assert run(StoreSettings(), GatewaySettings(host="0.0.0.0")) == 1
    assert "MILLSTREAM_API_KEYS" in capsys.readouterr().err
