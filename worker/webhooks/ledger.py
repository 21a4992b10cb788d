"""What the dispatchers remember together: the signing secret, the tries of each webhook, the dead letters."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from infra.connect import Server
from infra.contracts import Struct
from infra.node import Argument
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
    def __init__(self, server: Server) -> None:
        """`close` closes the server's connections too."""
        self._server = server

    @classmethod
    def open(cls, url: str) -> Ledger:
        """Over connections of its own, made when needed."""
        return cls(Server(url))

    async def secret(self) -> str:
        """The deployment's signing secret, made at the first call of the first process."""
        _, secret = await self._server.batch(("SET", SECRET, new_secret(), "NX"), ("GET", SECRET))
        return str(secret.decode())

    async def begin_try(self, message: Message) -> tuple[int, Fate]:
        """Counts one more try; returns its number from 1, and what had become of the webhook before it."""
        key = _key(message.id)
        num_tries, fate, _ = await self._server.batch(
            ("HINCRBY", key, "num_tries", 1), ("HGET", key, "fate"), ("EXPIRE", key, DEAD_SECONDS)
        )
        return int(num_tries), Fate(fate.decode()) if fate else Fate.OPEN

    async def note(self, message: Message, fate: Fate, reason: str, *, now_ms: int) -> None:
        """Writes down what came of a try. A dead letter is listed first, so that none is known to itself alone."""
        if fate is Fate.DEAD:
            await self._server.batch(
                ("ZADD", DEAD, now_ms, message.id),
                ("ZREMRANGEBYSCORE", DEAD, "-inf", now_ms - DEAD_SECONDS * 1000),
            )
        fields: dict[str, Argument] = {
            "url": message.url, "type": message.type, "body": message.body,
            "fate": fate, "reason": reason, "changed_ms": now_ms,
        }  # fmt: skip
        key = _key(message.id)
        await self._server.batch(
            ("HSET", key, *(part for pair in fields.items() for part in pair)),
            ("EXPIRE", key, DEAD_SECONDS if fate is Fate.DEAD else LOG_SECONDS),
        )

    async def entry(self, webhook_id: str) -> Entry | None:
        fields = await self._server.command("HGETALL", _key(webhook_id))
        if b"fate" not in fields:
            return None
        body = fields.pop(b"body")
        texts = {name.decode(): value.decode() for name, value in fields.items()}
        return msgspec.convert({**texts, "id": webhook_id, "body": body}, Entry, strict=False)

    async def dead_letters(self, *, limit: int) -> list[str]:
        """Ids of webhooks that were given up, newest first."""
        return [one.decode() for one in await self._server.command("ZREVRANGE", DEAD, 0, limit - 1)]

    async def close(self) -> None:
        await self._server.close()


def _key(webhook_id: str) -> str:
    return f"ms:webhook:{{{webhook_id}}}"
