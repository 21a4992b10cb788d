"""A gateway over each kind of store, on a free port, with a scripted worker behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from api_gateway.tasks import end
from infra.blobs import Blobs, open_blobs
from infra.contracts import ModelCard
from infra.settings import GatewaySettings
from infra.store import JobStore
from tests.gateway.gateway_aids import (
    ALIAS,
    CHAT_TEMPLATE,
    CONTEXT,
    VOCABULARY,
    Running,
    another,
    byte_tokenizer,
    serving,
)
from tests.gateway.scripted import ScriptedWorker


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return open_blobs((tmp_path / "blobs").as_uri())


@pytest.fixture
def card(blobs: Blobs) -> ModelCard:
    blobs.put("tokenizers/test", byte_tokenizer().encode())
    return ModelCard(
        alias=ALIAS,
        max_model_len=CONTEXT,
        vocab_size=VOCABULARY,
        tokenizer_digest="test",
        tokenizer_blob="tokenizers/test",
        weights_digest="none",
        profile="scripted",
        chat_template=CHAT_TEMPLATE,
        created_ms=1_700_000_000_000,
    )


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(keepalive_seconds=0.2, event_page=8, shutdown_seconds=2.0, default_max_tokens=6)


@pytest.fixture
async def running(store: JobStore, blobs: Blobs, card: ModelCard, settings: GatewaySettings) -> AsyncIterator[Running]:
    """A gateway that knows one model, `echo`, with no worker behind it."""
    await store.put_card(card)
    async with serving(store, blobs, settings) as running:
        yield running


@pytest.fixture
async def worker(running: Running, store: JobStore, store_url: str) -> AsyncIterator[ScriptedWorker]:
    """A worker for the model of `running`."""
    own = await another(store, store_url)
    worker = ScriptedWorker(own, await store.open_lane(ALIAS))
    task = asyncio.create_task(worker.serve())
    yield worker
    await end(task)
    await own.close()


@pytest.fixture
async def more_gateways(
    running: Running, store: JobStore, store_url: str, blobs: Blobs, settings: GatewaySettings
) -> AsyncIterator[Callable[[], Any]]:
    """Starts further gateways over the same store."""
    async with AsyncExitStack() as stack:

        async def start() -> Running:
            own = await another(store, store_url)
            stack.push_async_callback(own.close)
            return await stack.enter_async_context(serving(own, blobs, settings))

        yield start
