"""One connection to a server: the bytes of commands out, their answers in, in order.

redis-py opens it (addresses, TLS, users, sentinels). What is asked then goes straight over its transport: through
redis-py's pool, streams and time limits, a command cost a gateway as much CPU as all the rest of a small submit.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import hiredis
from redis._parsers import BaseParser
from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as NoAnswer

_NOT_YET = object()


class Wire(asyncio.Protocol):
    """It serves one caller at a time, and is closed where that one leaves before the answers are in."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection  # redis-py's, which would close the transport if it were forgotten
        self._transport: asyncio.Transport = connection._writer.transport
        self._parser = hiredis.Reader(
            protocolError=InvalidResponse, replyError=BaseParser.parse_error, notEnoughData=_NOT_YET
        )
        self._answers: list[Any] = []
        self._num_wanted = 0
        self._asked: asyncio.Future[list[Any]] | None = None
        self._gone = asyncio.Event()
        self.peer: Any = self._transport.get_extra_info("peername")

    @classmethod
    async def open(cls, pool: ConnectionPool) -> Wire:
        """To the server that the pool's address means now. Raises redis errors; limits no time."""
        connection = cast(Any, pool).make_connection()
        try:
            await connection.connect()
            wire = cls(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        wire._transport.set_protocol(wire)
        return wire

    @property
    def is_usable(self) -> bool:
        return self._asked is None and not self._transport.is_closing()

    async def ask(self, packed: bytes, num_answers: int, *, timeout_seconds: float) -> list[Any]:
        """The answers; errors of single commands are among them. Raises redis's ConnectionError or TimeoutError."""
        loop = asyncio.get_running_loop()
        self._asked = asked = loop.create_future()
        self._num_wanted = num_answers
        limit = loop.call_later(timeout_seconds, self._give_up, timeout_seconds)
        try:
            self._transport.write(packed)
            answers: list[Any] = await asked
        except BaseException:
            self.close()  # what is still to be read must not answer the next command
            raise
        finally:
            limit.cancel()
        self._asked = None
        return answers

    def close(self) -> None:
        self._connection._close()

    async def closed(self) -> None:
        await self._gone.wait()

    # --- what the transport tells ---

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed(data)
            while (answer := self._parser.gets()) is not _NOT_YET:
                self._answers.append(answer)
        except InvalidResponse as error:
            self._fail(ConnectionLost(f"this is no answer of a server: {error}"))
            return
        is_waiting = self._asked is not None and not self._asked.done()
        if not is_waiting or len(self._answers) > self._num_wanted:
            self._fail(ConnectionLost("the server answers what was not asked"))
        elif len(self._answers) == self._num_wanted:
            answers, self._answers = self._answers, []
            cast(Any, self._asked).set_result(answers)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionLost(f"the connection was lost: {exc or 'the server closed it'}"))
        self._gone.set()

    def _give_up(self, timeout_seconds: float) -> None:
        self._fail(NoAnswer(f"no answer within {timeout_seconds:g} s"))

    def _fail(self, error: Exception) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(error)
        self.close()
