"""The whole way of a request: HTTP, gateway, queue, worker, engine; one process, one store in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import LLM
from infra.blob_folder import FolderBlobs
from infra.memory import MemoryJobs
from infra.settings import GatewaySettings
from infra.store import JobStore
from tests.gateway import gateway_aids
from tests.worker import worker_aids

MODEL = "fake"  # the alias of whatever model the worker runs


@dataclass
class Service:
    client: httpx.AsyncClient
    worker: worker_aids.Running
    store: JobStore

    async def post(self, route: str, body: dict[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
        """Status and body of POST /v1/`route`; whatever comes back must be JSON to the letter of its RFC."""
        if isinstance(body, bytes):
            answer = await self.client.post(f"/v1/{route}", content=body, headers={"content-type": "application/json"})
        else:
            answer = await self.client.post(f"/v1/{route}", json={"model": MODEL, **body})
        return answer.status_code, strict_json(answer.content)

    async def chunks(self, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """What a stream of POST /v1/`route` holds, each chunk as strict JSON."""
        found = []
        async with self.client.stream("POST", f"/v1/{route}", json={"model": MODEL, "stream": True, **body}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    found.append(strict_json(line[6:].encode()))
        return found

    async def assert_healthy(self) -> None:
        """Nobody else was hurt: the gateway is ready, and a good request is answered."""
        assert (await self.client.get("/healthz")).status_code == 200
        assert (await self.client.get("/readyz")).status_code == 200
        status, body = await self.post("completions", {"prompt": "good", "max_tokens": 2})
        assert status == 200 and body["usage"]["completion_tokens"] == 2


def strict_json(content: bytes) -> dict[str, Any]:
    """Python's reader takes NaN and Infinity; JSON has neither."""
    value: dict[str, Any] = json.loads(content.decode("utf-8"), parse_constant=pytest.fail)
    return value


@asynccontextmanager
async def serve(blob_folder: Path, load: Callable[[], LLM], **settings: Any) -> AsyncIterator[Service]:
    store, blobs = MemoryJobs(), FolderBlobs(blob_folder)

    async def another() -> JobStore:
        return store.another()

    backend = worker_aids.Backend(store, another, blobs)
    gateway = GatewaySettings(shutdown_seconds=2.0, default_max_tokens=16, **settings)
    async with (
        worker_aids.serving(backend, load=load, settings=replace(worker_aids.SETTINGS, alias=MODEL)) as worker,
        gateway_aids.serving(store, blobs, gateway) as running,
    ):
        yield Service(running.client, worker, store)
