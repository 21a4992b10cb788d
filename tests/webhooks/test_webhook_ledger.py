"""What the dispatchers remember together, on a server that is full."""

from __future__ import annotations

from pathlib import Path

import redis

from infra.embedded import EmbeddedServer
from worker.webhooks.event import Message
from worker.webhooks.ledger import Fate, Ledger

MESSAGE = Message(id="m", type="job.succeeded", url="https://example.com/", body=b"{}")


async def test_tries_are_counted_and_noted_when_memory_is_full(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as url, redis.Redis.from_url(url) as server:
        ledger = Ledger.open(url)
        server.config_set("maxmemory", 1)
        assert await ledger.secret() == await ledger.secret()
        assert await ledger.begin_try(MESSAGE) == (1, Fate.OPEN)
        await ledger.note(MESSAGE, Fate.OPEN, "the endpoint answered 500", now_ms=1)
        assert await ledger.begin_try(MESSAGE) == (2, Fate.OPEN)
        await ledger.note(MESSAGE, Fate.DEAD, "2 tries are enough", now_ms=2)
        assert await ledger.dead_letters(limit=10) == ["m"]
        entry = await ledger.entry("m")
        assert entry is not None and (entry.num_tries, entry.fate) == (2, Fate.DEAD)
        assert server.ttl("ms:webhook:{m}") > 29 * 86400
        await ledger.close()
