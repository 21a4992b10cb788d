"""What the gateway's tests share beside fixtures: the model they ask for, and gateways that serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api_gateway.app import create_app
from api_gateway.gateway import Gateway
from api_gateway.main import GatewayServer, listening
from infra.blobs import Blobs
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
