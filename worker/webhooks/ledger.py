"""What the dispatchers remember together: the signing secret, the tries of each webhook, the dead letters."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from infra.connect import Server
from infra.contracts import Struct
from infra.node import Argument
from infra.script_caller import ScriptCaller
from worker.webhooks.event import Message
from worker.webhooks.signing import new_secret

SECRET = "ms:webhooks:secret"
DEAD = "ms:webhooks:dead"  # sorted set: webhook id -> when it was given up (ms)
LOG_SECONDS = 7 * 86400
DEAD_SECONDS = 30 * 86400


# One script for what belongs together: a transaction would be refused where memory is full, and work must end then.
_SECRET = """#!lua flags=allow-oom
redis.call('SETNX', KEYS[1], ARGV[1])
return redis.call('GET', KEYS[1])
"""
_BEGIN_TRY = """#!lua flags=allow-oom
local num_tries = redis.call('HINCRBY', KEYS[1], 'num_tries', 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
return { num_tries, redis.call('HGET', KEYS[1], 'fate') }
"""
_LIST_DEAD = """#!lua flags=allow-oom
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
return redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[3])
"""
_NOTE = """#!lua flags=allow-oom
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
return redis.call('EXPIRE', KEYS[1], ARGV[1])
"""


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
        self._scripts = ScriptCaller(server)

    @classmethod
    def open(cls, url: str) -> Ledger:
        """Over connections of its own, made when needed."""
        return cls(Server(url))

    async def secret(self) -> str:
        """The deployment's signing secret, made at the first call of the first process."""
        secret = await self._scripts.call(_SECRET, [SECRET], [new_secret()])
        return str(secret.decode())

    async def begin_try(self, message: Message) -> tuple[int, Fate]:
        """Counts one more try; returns its number from 1, and what had become of the webhook before it."""
        num_tries, fate = await self._scripts.call(_BEGIN_TRY, [_key(message.id)], [DEAD_SECONDS])
        return int(num_tries), Fate(fate.decode()) if fate else Fate.OPEN

    async def note(self, message: Message, fate: Fate, reason: str, *, now_ms: int) -> None:
        """Writes down what came of a try. A dead letter is listed first, so that none is known to itself alone."""
        if fate is Fate.DEAD:
            await self._scripts.call(_LIST_DEAD, [DEAD], [now_ms, message.id, now_ms - DEAD_SECONDS * 1000])
        fields: dict[str, Argument] = {
            "url": message.url, "type": message.type, "body": message.body,
            "fate": fate, "reason": reason, "changed_ms": now_ms,
        }  # fmt: skip
        keep_seconds = DEAD_SECONDS if fate is Fate.DEAD else LOG_SECONDS
        flat = [part for pair in fields.items() for part in pair]
        await self._scripts.call(_NOTE, [_key(message.id)], [keep_seconds, *flat])

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
