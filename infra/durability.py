"""When a write counts as kept: at once, once it is on disk, or once replicas have it.

Waiting proves something only on the connection that wrote, behind a write of its own: another connection may speak to
another server by now, and a script that changed nothing gives the server nothing to wait for. So each batch that needs
proof carries a mark and the wait:

    EVALSHA submit ...      what must be kept, or what was read and must not be relayed before it is kept
    SET ms:{lane}:mark      later in the server's order than all of it
    WAITAOF 1 0 | WAIT n 0  until the mark is there, then so is the rest

`fsync` demands `appendfsync always` everywhere, and WAITAOF beside it where there is one. WAITAOF alone is no proof:
under `everysec`, servers from Redis 7.4 on (mended in 8.0 by redis/redis#13793) and Valkey up to 9.1 answer it although
less than a second has passed since the last sync and nothing was synced; `make chaos` has seen jobs lost so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.connect import Server
from infra.errors import StoreUnavailable, StoreUnsuitable
from infra.node import Argument
from infra.settings import StoreSettings

_MARK = "#!lua flags=allow-oom\nreturn redis.call('SET', KEYS[1], '')"  # a plain SET is refused when memory is full
WAIT_SECONDS = 3.0  # under the connections' time-out


@dataclass(frozen=True, slots=True)
class Durability:
    """What an acceptance or an outcome waits for before anyone is told of it."""

    mode: Literal["fast", "fsync", "replicated"] = "fast"
    num_replicas: int = 1  # of `replicated`
    has_waitaof: bool = True

    @classmethod
    async def of(cls, settings: StoreSettings, server: Server) -> Durability:
        """As set, for this server. Raises StoreUnsuitable where it cannot keep it, with what to change."""
        if settings.durability == "replicated" and settings.durability_replicas < 1:
            raise StoreUnsuitable("durability_replicas must be at least 1 where durability is replicated")
        has_waitaof = True
        if settings.durability == "fsync":
            if not all(about.get("aof_enabled") for about in await server.everywhere("INFO", "persistence")):
                raise StoreUnsuitable("durability is fsync, but the server keeps no append-only file: appendonly yes")
            has_waitaof = all(about is not None for [about] in await server.everywhere("COMMAND INFO", "WAITAOF"))
            await _demand_always(server)
        return cls(settings.durability, settings.durability_replicas, has_waitaof)

    @property
    def needs_proof(self) -> bool:
        """False where a reply is proof enough: the server syncs before it answers, or nobody wants to wait."""
        return self.mode == "replicated" or (self.mode == "fsync" and self.has_waitaof)

    def proof(self, mark: str) -> list[tuple[Argument, ...]]:
        """The commands that end a batch; `mark` is a key in the batch's slot."""
        wait_ms = round(WAIT_SECONDS * 1000)
        if not self.needs_proof:
            return []
        write = ("EVAL", _MARK, 1, mark)
        if self.mode == "fsync":
            return [write, ("WAITAOF", 1, 0, wait_ms)]
        return [write, ("WAIT", self.num_replicas, wait_ms)]

    def check(self, answer: Any) -> None:
        """Raises StoreUnavailable unless the last answer of a batch says that the mark is kept."""
        if not self.needs_proof:
            return
        wanted = 1 if self.mode == "fsync" else self.num_replicas
        count = answer[0] if self.mode == "fsync" else answer
        if count < wanted:
            where = "on disk" if self.mode == "fsync" else f"on {wanted} replicas, only on {count}"
            raise StoreUnavailable(f"the store did not say within {WAIT_SECONDS:.0f} s that it is {where}; try again")

    async def batch(self, server: Server, mark: str, *commands: Sequence[Argument]) -> list[Any]:
        """The answers of the commands, once all that they wrote or read is kept."""
        answers = await server.batch(*commands, *self.proof(mark))
        self.check(answers[-1])
        return answers[: len(commands)]


async def _demand_always(server: Server) -> None:
    """Raises StoreUnsuitable unless the server syncs before it answers."""
    for said in await server.everywhere("CONFIG GET", "appendfsync"):
        policy = said.get("appendfsync") or said.get(b"appendfsync")
        if policy in ("always", b"always"):
            continue
        raise StoreUnsuitable(
            "durability is fsync, but the server answers before it has synced: set appendfsync always "
            "(CONFIG SET appendfsync always, and in the server's configuration)"
        )
