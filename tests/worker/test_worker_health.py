"""The health port: whether the process lives, and whether its store answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import pytest

from infra.memory import MemoryJobs
from infra.ports import free_port
from tests.worker.worker_aids import Faults, FaultyStore
from worker.health import CannotListen, health_served


async def test_it_lives_without_its_store_and_is_not_ready_then() -> None:
    faults, port = Faults(), free_port()
    store = FaultyStore(MemoryJobs(), faults)
    async with (
        health_served(port, store, setting="health_port"),  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        assert [(await client.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        faults.is_away = True
        assert (await client.get("/healthz")).status_code == 200
        refused = await client.get("/readyz")
        assert refused.status_code == 503 and "store" in refused.text
        faults.is_away = False
        assert (await client.get("/readyz")).status_code == 200
        assert [(await client.request(*ask)).status_code for ask in (("GET", "/"), ("POST", "/healthz"))] == [404, 404]


async def test_what_is_no_request_harms_nobody() -> None:
    port = free_port()
    async with health_served(port, MemoryJobs(), setting="health_port"):
        for junk in (b"", b"GET", b"x" * 100_000, b"\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(junk)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as taken, pytest.raises(CannotListen, match="health_port: cannot listen on"):
        async with health_served(taken.getsockname()[1], MemoryJobs(), setting="health_port"):
            pass
