"""What the dispatchers remember together: the signing secret, the tries of each webhook, the dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.contracts import Struct
from infra.errors import StoreUnavailable
from worker.webhooks.event import Message
from worker.webhooks.signing import new_secret

SECRET = "ms:webhooks:secret"
DEAD = "ms:webhooks:dead"  # sorted set: webhook id -> when it was given up (ms)
LOG_SECONDS = 7 * 86400
DEAD_SECONDS = 30 * 86400


class Fate(StrEnum):
    OPEN = "open"
    DELIVERED = "delivered"
    DEAD = "dead"


class Entry(Struct):
    """What became of one webhook so far."""

    id: str
    url: str
    type: str
    body: bytes  # as sent, so that a dead letter can be sent again
    num_tries: int
    fate: Fate
    reason: str = ""  # of the last try
    changed_ms: int = 0


class Ledger:
    def __init__(self, client: Redis) -> None:
        """`client` must answer in bytes; `close` closes it."""
        self._client: Any = client

    async def secret(self) -> str:
        """The deployment's signing secret, made at the first call of the first process."""
        with _store_errors():
            await self._client.set(SECRET, new_secret(), nx=True)
            return str((await self._client.get(SECRET)).decode())

    async def begin_try(self, message: Message) -> tuple[int, Fate]:
        """Counts one more try; returns its number from 1, and what had become of the webhook before it."""
        key = _key(message.id)
        with _store_errors():
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hincrby(key, "num_tries", 1)
                pipe.hget(key, "fate")
                pipe.expire(key, DEAD_SECONDS)
                num_tries, fate, _ = await pipe.execute()
        return int(num_tries), Fate(fate.decode()) if fate else Fate.OPEN

    async def note(self, message: Message, fate: Fate, reason: str, *, now_ms: int) -> None:
        """Writes down what came of a try."""
        key = _key(message.id)
        fields = {
            "url": message.url, "type": message.type, "body": message.body,
            "fate": fate, "reason": reason, "changed_ms": now_ms,
        }  # fmt: skip
        with _store_errors():
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.hset(key, mapping=fields)
                pipe.expire(key, DEAD_SECONDS if fate is Fate.DEAD else LOG_SECONDS)
                if fate is Fate.DEAD:
                    pipe.zadd(DEAD, {message.id: now_ms})
                    pipe.zremrangebyscore(DEAD, "-inf", now_ms - DEAD_SECONDS * 1000)
                await pipe.execute()

    async def entry(self, webhook_id: str) -> Entry | None:
        with _store_errors():
            fields = await self._client.hgetall(_key(webhook_id))
        if b"fate" not in fields:
            return None
        body = fields.pop(b"body")
        texts = {name.decode(): value.decode() for name, value in fields.items()}
        return msgspec.convert({**texts, "id": webhook_id, "body": body}, Entry, strict=False)

    async def dead_letters(self, *, limit: int) -> list[str]:
        """Ids of webhooks that were given up, newest first."""
        with _store_errors():
            return [one.decode() for one in await self._client.zrevrange(DEAD, 0, limit - 1)]

    async def close(self) -> None:
        await self._client.aclose()


def _key(webhook_id: str) -> str:
    return f"ms:webhook:{{{webhook_id}}}"


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise StoreUnavailable(f"the store failed: {error}") from error
