"""A submit's handler is called past the framework; what it refuses is answered as by any other route."""

from __future__ import annotations

import httpx

from infra.blobs import Blobs
from infra.contracts import ModelCard
from infra.memory import MemoryJobs
from infra.settings import GatewaySettings
from tests.gateway.gateway_aids import ALIAS, Running, serving

# Of the same answers, what differs with each.
VARYING = {"date", "content-length", "x-request-id"}


class Broken(MemoryJobs):
    """Fails as no store may."""

    async def claim_key(self, tenant: str, route: str, key: str, fingerprint: str, job_id: str) -> str:
        raise RuntimeError("a defect")


async def both(running: Running, content: bytes, headers: dict[str, str]) -> list[httpx.Response]:
    """The answers of a route that is called directly and of one that the framework calls, to the same request."""
    paths = ("/v1/jobs", "/v1/chat/completions")
    return [await running.client.post(path, content=content, headers=headers) for path in paths]


async def test_refusals_are_those_of_the_framework(running: Running) -> None:
    oversized = b"x" * (running.gateway.settings.max_body_bytes + 1)
    for content, status in ((b"", 400), (b"{", 400), (b"[]", 400), (b'{"modle": 1}', 400), (oversized, 413)):
        direct, framework = await both(running, content, {"content-type": "application/json"})
        assert direct.status_code == framework.status_code == status
        assert direct.headers["x-request-id"] and direct.headers.keys() == framework.headers.keys()
        assert all(direct.headers[name] == framework.headers[name] for name in direct.headers.keys() - VARYING)
        assert direct.json()["error"].keys() == framework.json()["error"].keys()


async def test_a_defect_is_an_internal_error_that_is_counted(card: ModelCard, blobs: Blobs) -> None:
    store = Broken()
    await store.put_card(card)
    async with serving(store, blobs, GatewaySettings()) as running:
        answer = await running.client.post(
            "/v1/jobs", json={"model": ALIAS, "input": "x"}, headers={"Idempotency-Key": "a"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert answer.headers["x-request-id"] and "a defect" not in answer.text
        counted = 'millstream_http_requests_total{method="POST",route="/v1/jobs",status="500"} 1.0'
        assert counted in (await running.gateway.metrics.text(running.gateway.outlook)).decode()
