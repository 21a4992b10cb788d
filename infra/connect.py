"""Connections to Redis or Valkey: made, probed, and their errors translated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import redis
from redis.asyncio import Redis

from infra.errors import StoreUnavailable, StoreUnsuitable
from infra.pools import pool_for

Argument = str | bytes | int | float

# What the server must know. EVALSHA_RO came with Redis 7.0, whose script flags we need; no version string is trusted.
_COMMANDS = ("XADD", "XREADGROUP", "XINFO", "ZRANGEBYSCORE", "EVALSHA", "EVALSHA_RO", "PEXPIRE")
# Answers that mean "not now": a replica, a failover, a full or failing disk, full memory, a script that blocks.
_NOT_NOW = ("OOM", "READONLY", "MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "UNBLOCKED", "BUSY",
            "LOADING")  # fmt: skip


@contextmanager
def translated() -> Iterator[None]:
    """Turns redis errors into ours: not now (StoreUnavailable), or never like this (StoreUnsuitable)."""
    try:
        yield
    except (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError) as error:
        raise StoreUnsuitable(f"the server refuses our credentials: {error}") from error
    except redis.exceptions.NoPermissionError as error:
        raise StoreUnsuitable(f"the server's access list denies us what we need: {error}") from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        raise StoreUnavailable(f"the store cannot be reached: {error}") from error
    except (redis.exceptions.OutOfMemoryError, redis.exceptions.ReadOnlyError) as error:
        raise StoreUnavailable(f"the store refuses writes: {error}") from error
    except redis.exceptions.ResponseError as error:
        if str(error).startswith(_NOT_NOW):
            raise StoreUnavailable(f"the store refuses this for now: {error}") from error
        raise


class Server:
    """One server, through a pool of connections of its own.

    It never repeats a command by itself: only callers know what may be repeated.
    """

    def __init__(self, url: str, *, max_connections: int = 32, timeout_seconds: float = 5.0) -> None:
        try:
            pool = pool_for(url, max_connections=max_connections, timeout_seconds=timeout_seconds)
        except ValueError as error:
            without_password = re.sub(r"//[^@/]*@", "//…@", url)
            raise StoreUnsuitable(f"{without_password!r} is no address of a server: {error}") from error
        self._client = Redis.from_pool(pool)

    async def raw(self, *parts: Argument) -> Any:
        """One command's answer. Raises redis errors as they are."""
        return await cast(Any, self._client).execute_command(*parts)

    async def command(self, *parts: Argument) -> Any:
        with translated():
            return await self.raw(*parts)

    async def batch(self, *commands: Sequence[Argument], atomic: bool = True, raise_errors: bool = True) -> list[Any]:
        """The answers of several commands in one round trip; `atomic`: as one transaction in one slot."""
        with translated():
            return await self.raw_batch(*commands, atomic=atomic, raise_errors=raise_errors)

    async def raw_batch(
        self, *commands: Sequence[Argument], atomic: bool = False, raise_errors: bool = False
    ) -> list[Any]:
        """As `batch`, but redis errors as they are; by default the server's are among the answers, not raised."""
        async with self._client.pipeline(transaction=atomic) as pipe:
            for command in commands:
                cast(Any, pipe).execute_command(*command)
            return await pipe.execute(raise_on_error=raise_errors)

    async def close(self) -> None:
        await self._client.aclose()


async def probe(server: Server) -> None:
    """Raises StoreUnsuitable where the server cannot keep our promises, with what to change."""
    known = await server.command("COMMAND INFO", *_COMMANDS)
    missing = [name for name, about in zip(_COMMANDS, known, strict=True) if about is None]
    if missing:
        raise StoreUnsuitable(
            f"the server does not know {', '.join(missing)}; use Redis 7.0 or newer, or Valkey 8 or newer"
        )
    policy = (await server.command("INFO", "memory")).get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreUnsuitable(
            f"the server would throw jobs away when memory is full: maxmemory-policy is {policy}. "
            "Set it to noeviction (CONFIG SET maxmemory-policy noeviction, and in the server's configuration)."
        )
