"""A gateway over each kind of store, on a free port, with a scripted worker behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import ScriptedWorker
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api_gateway.app import create_app
from api_gateway.gateway import Gateway
from api_gateway.main import GatewayServer, listening
from api_gateway.tasks import end
from infra.blobs import Blobs, open_blobs
from infra.contracts import ModelCard
from infra.memory import MemoryJobs
from infra.settings import GatewaySettings
from infra.store import JobStore

ALIAS = "echo"
CONTEXT = 512
VOCABULARY = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}{{ raise_exception('an answer cannot come first') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
)


def byte_tokenizer() -> str:
    """tokenizer.json of one token a byte, and one for each of aa, aaaa, aaaaaaaa."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for length in (1, 2, 4):
        vocabulary["a" * 2 * length] = len(vocabulary)
        merges.append(("a" * length, "a" * length))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


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


@dataclass
class Running:
    """A gateway that serves."""

    url: str
    gateway: Gateway
    server: GatewayServer
    client: httpx.AsyncClient

    def api(self, **fields: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30.0, **fields)


@asynccontextmanager
async def serving(store: JobStore, blobs: Blobs, settings: GatewaySettings, **parts: Any) -> AsyncIterator[Running]:
    """A gateway on a free port for as long as the context lasts."""
    app = create_app(store, blobs, settings, **parts)
    gateway: Gateway = app.state.gateway
    server = GatewayServer(app, gateway)
    with listening("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
            if task.done():
                await task
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
            yield Running(url, gateway, server, client)
        server.should_exit = True
        await task


async def another(store: JobStore, store_url: str) -> JobStore:
    """A client of its own to the same store."""
    if isinstance(store, MemoryJobs):
        return store.another()
    from infra.jobs import RedisJobs

    return await RedisJobs.connect(store_url)


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
