"""One server, through a pool of connections of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import redis
from redis.asyncio import Redis

from infra.pools import pool_for

Argument = str | bytes | int | float
Command = Sequence[Argument]


class Node:
    """It never repeats a command by itself: only callers know what may be repeated.

    Every method raises redis errors as they are. `near` is for a Cluster: one server alone has every key.
    """

    def __init__(self, url: str, *, max_connections: int, timeout_seconds: float) -> None:
        """Connects to nothing. Raises ValueError for an address that is none."""
        pool = pool_for(url, max_connections=max_connections, timeout_seconds=timeout_seconds)
        self._client = Redis.from_pool(pool)

    async def one(self, command: Command, *, near: Argument | None = None) -> Any:
        return await cast(Any, self._client).execute_command(*command)

    async def several(self, commands: Sequence[Command], *, near: Argument | None = None) -> list[Any]:
        """The answers of several commands on one connection; errors of single ones are among them, not raised."""
        async with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                cast(Any, pipe).execute_command(*command)
            return await pipe.execute(raise_on_error=False)

    async def asking(self, commands: Sequence[Command]) -> list[Any]:
        """As `several`, of a server that a slot is just moving to. The word counts for one command, on its connection.

        redis-py's own cluster client sends it as a command by itself, which may take another connection.
        """
        asked = [part for command in commands for part in (("ASKING",), command)]
        return (await self.several(asked))[1::2]

    async def everywhere(self, command: Command) -> list[Any]:
        return [await self.one(command)]

    async def close(self) -> None:
        await self._client.aclose()

    async def let_go(self) -> None:
        """Closes the connections that are idle; those in use end with what they do."""
        await self._client.connection_pool.disconnect(inuse_connections=False)


def first_error(answers: Sequence[Any]) -> Exception | None:
    return next((answer for answer in answers if isinstance(answer, Exception)), None)


def is_lost(error: BaseException) -> bool:
    """Whether the connection broke: nobody knows what became of the command."""
    return isinstance(error, (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError))
