"""One server, through connections of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar, cast

import hiredis
import redis
from redis.asyncio import Redis
from redis.asyncio.sentinel import SentinelConnectionPool

from infra.pools import pool_for
from infra.wire import Wire

Argument = str | bytes | int | float
Command = Sequence[Argument]
T = TypeVar("T")

CLOSE_SECONDS = 1.0  # for a server to answer that a connection ends


class Node:
    """It never repeats a command by itself: only callers know what may be repeated.

    Every method raises redis errors as they are. `near` is for a Cluster: one server alone has every key.
    """

    def __init__(self, url: str, *, max_connections: int, timeout_seconds: float) -> None:
        """Connects to nothing. Raises ValueError for an address that is none."""
        self._pool = pool_for(url, timeout_seconds=timeout_seconds)
        self._shapes: dict[Any, Any] = dict(Redis.from_pool(self._pool).response_callbacks)
        self._timeout_seconds = timeout_seconds
        self._slots = asyncio.Semaphore(max_connections)
        self._wires = set[Wire]()
        self._idle: list[Wire] = []
        self._peer: Any = None  # whom the newest connection leads to
        self._is_let_go = False

    async def one(self, command: Command, *, near: Argument | None = None) -> Any:
        [answer] = await self.several([command])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def several(self, commands: Sequence[Command], *, near: Argument | None = None) -> list[Any]:
        """The answers of several commands on one connection; errors of single ones are among them, not raised.

        The time limit is for a connection first, then for the answers.
        """
        packed = b"".join(map(_packed, commands))
        wire = await self._take()
        try:
            answers = await wire.ask(packed, len(commands), timeout_seconds=self._timeout_seconds)
            for answer in answers:
                if isinstance(answer, Exception):
                    self._judge(answer, wire)
        finally:
            self._give_back(wire)
        return [self._shaped(*each) for each in zip(commands, answers, strict=True)]

    async def _take(self) -> Wire:
        """A connection that nobody uses, for which a slot is taken. Raises redis errors."""
        if self._slots.locked():
            await self._in_time(self._slots.acquire())
        else:
            await self._slots.acquire()  # at once
        try:
            kept = self._kept()
            return await self._in_time(self._opened()) if kept is None else kept
        except BaseException:
            self._slots.release()
            raise

    def _kept(self) -> Wire | None:
        """A connection from before, if one is left."""
        while self._idle:
            wire = self._idle.pop()
            if wire.is_usable:
                return wire
            self._forget(wire)
        return None

    async def _opened(self) -> Wire:
        wire = await Wire.open(self._pool)
        self._wires.add(wire)
        self._peer = wire.peer
        # The address may mean another server than before: after a failover, none of the old one's is used again.
        for other in [other for other in self._idle if other.peer != wire.peer]:
            self._idle.remove(other)
            self._forget(other)
        return wire

    async def _in_time(self, opening: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await opening
        except TimeoutError:
            raise redis.exceptions.TimeoutError(f"no connection within {self._timeout_seconds:g} s") from None

    def _give_back(self, wire: Wire) -> None:
        if wire.is_usable and wire.peer == self._peer and not self._is_let_go:
            self._idle.append(wire)
        else:
            self._forget(wire)
        self._slots.release()

    def _forget(self, wire: Wire) -> None:
        wire.close()
        self._wires.discard(wire)

    def _judge(self, error: Exception, wire: Wire) -> None:
        """Raises errors that are not the command's but the connection's."""
        if isinstance(error, redis.exceptions.ConnectionError):  # still loading, too many clients
            wire.close()
            raise error
        if isinstance(error, redis.exceptions.ReadOnlyError):  # a primary no more: another connection may find it
            wire.close()
            if isinstance(self._pool, SentinelConnectionPool):
                raise redis.exceptions.ConnectionError("the previous primary is a replica now") from error

    def _shaped(self, command: Command, answer: Any) -> Any:
        shape = self._shapes.get(command[0])
        return answer if shape is None or isinstance(answer, Exception) else shape(answer)

    async def asking(self, commands: Sequence[Command]) -> list[Any]:
        """As `several`, of a server that a slot is just moving to. The word counts for one command, on its connection.

        redis-py's own cluster client sends it as a command by itself, which may take another connection.
        """
        asked = [part for command in commands for part in (("ASKING",), command)]
        return (await self.several(asked))[1::2]

    async def everywhere(self, command: Command) -> list[Any]:
        return [await self.one(command)]

    async def close(self) -> None:
        """Ends all connections; what is asked over them meanwhile fails."""
        self._is_let_go = True
        wires = list(self._wires)
        for wire in wires:
            self._forget(wire)
        if wires:
            await asyncio.wait([asyncio.ensure_future(wire.closed()) for wire in wires], timeout=CLOSE_SECONDS)

    def let_go(self) -> None:
        """Closes the connections that are idle; those in use end with what they do."""
        self._is_let_go = True
        for wire in self._idle:
            self._forget(wire)
        self._idle.clear()


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
