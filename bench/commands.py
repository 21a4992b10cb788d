"""Counts the commands that a store gets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio


@asynccontextmanager
async def counted(redis_url: str) -> AsyncIterator[Counter[str]]:
    """The commands that clients send to this database meanwhile, by name; what scripts do inside counts as nothing."""
    counts: Counter[str] = Counter()
    database, mark = urlsplit(redis_url).path.strip("/"), "the monitor listens"

    async def listen(monitor: Any) -> None:
        async for command in monitor.listen():
            if command["client_type"] != "lua" and str(command["db"]) == database:
                counts[command["command"].split(" ")[0]] += 1

    client = redis.asyncio.Redis.from_url(redis_url)
    async with client.monitor() as monitor:
        listening = asyncio.create_task(listen(monitor))
        while not counts:
            await client.echo(mark)
            await asyncio.sleep(0.01)
        counts.clear()
        yield counts
        seen = counts["ECHO"]
        await client.echo(mark)
        async with asyncio.timeout(30):
            while counts["ECHO"] == seen:  # noqa: ASYNC110 (all that was sent before has been counted by then)
                await asyncio.sleep(0.01)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    await client.aclose()
