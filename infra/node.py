"""One server, through a pool of connections of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import hiredis
import redis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

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
        self._timeout_seconds = timeout_seconds

    async def one(self, command: Command, *, near: Argument | None = None) -> Any:
        [answer] = await self.several([command])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def several(self, commands: Sequence[Command], *, near: Argument | None = None) -> list[Any]:
        """The answers of several commands on one connection; errors of single ones are among them, not raised.

        Straight over a connection of the pool. redis-py's own way packs each argument in Python and tells telemetry of
        every command: twice the CPU of this, and a third of what a submit costs a gateway.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._exchange(commands)
        except TimeoutError:
            raise redis.exceptions.TimeoutError(f"no answer within {self._timeout_seconds:g} s") from None

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        packed = b"".join(map(_packed, commands))
        pool = self._client.connection_pool
        connection: AbstractConnection = await cast(Any, pool).get_connection()
        try:
            await connection.send_packed_command(packed, check_health=False)
            return [await self._answer(connection, command) for command in commands]
        except BaseException:
            await connection.disconnect(nowait=True)  # what is still to be read must not answer the next command
            raise
        finally:
            await pool.release(connection)

    async def _answer(self, connection: AbstractConnection, command: Command) -> Any:
        try:
            answer = await connection.read_response(disconnect_on_error=False)
        except redis.exceptions.ResponseError as error:
            return error
        shape = self._client.response_callbacks.get(str(command[0]))
        return answer if shape is None else shape(answer)

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


def _packed(command: Command) -> bytes:
    """The command as the server reads it; a name of two words ("XINFO STREAM") is two arguments."""
    name, *arguments = command
    packed: bytes = hiredis.pack_command(cast(Any, (*str(name).split(), *arguments)))
    return packed


def first_error(answers: Sequence[Any]) -> Exception | None:
    return next((answer for answer in answers if isinstance(answer, Exception)), None)


def is_lost(error: BaseException) -> bool:
    """Whether the connection broke: nobody knows what became of the command."""
    return isinstance(error, (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError))
