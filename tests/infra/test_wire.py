"""A server's connections, against a server that misbehaves as told: answers go to whoever asked, or to nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import redis

from infra.node import Node

Conduct = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Answers:
    """What was asked, and how many connections were opened and have ended."""

    def __init__(self) -> None:
        self.num_opened = self.num_ended = 0


@asynccontextmanager
async def served(
    conduct: Conduct, *, max_connections: int = 4, seconds: float = 5.0
) -> AsyncIterator[tuple[Node, Answers]]:
    """A node whose server does as `conduct`(number of the connection, reader, writer) does."""
    seen = Answers()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.num_opened += 1
        try:
            await conduct(seen.num_opened, reader, writer)
            await reader.read()  # until the client goes
        except ConnectionError:
            pass
        finally:
            seen.num_ended += 1
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    node = Node(f"redis://127.0.0.1:{port}/0", max_connections=max_connections, timeout_seconds=seconds)
    try:
        yield node, seen
    finally:
        await node.close()
        server.close()


async def asked(reader: asyncio.StreamReader) -> str:
    """The last argument of the next command."""
    [num] = [int((await reader.readuntil(b"\r\n"))[1:])]
    for _ in range(num):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        argument = (await reader.readexactly(size + 2))[:-2].decode()
    return argument


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each command with its last argument."""
    while True:
        try:
            text = await asked(reader)
        except asyncio.IncompleteReadError:
            return
        writer.write(f"+{text}\r\n".encode())


async def test_answers_may_come_in_any_pieces() -> None:
    async def conduct(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await asked(reader)
        for byte in b"$5\r\nab\r\nc\r\n*2\r\n:7\r\n-ERR no\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    async with served(conduct) as (node, _):
        text, (number, error) = await node.several([("GET", "a"), ("LRANGE", "b")])
    assert (text, number) == (b"ab\r\nc", 7)
    assert isinstance(error, redis.exceptions.ResponseError)


async def test_one_connection_serves_one_after_the_other() -> None:
    async def conduct(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await echo(reader, writer)

    async with served(conduct) as (node, seen):
        for number in range(50):
            assert await node.one(("ECHO", str(number))) == str(number).encode()
        assert seen.num_opened == 1


async def test_what_nobody_asked_answers_nobody() -> None:
    """Right behind an answer, in the same piece, and later, while the connection is idle."""

    async def conduct(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            await asked(reader)
            writer.write(b"+right\r\n+stray\r\n")
        elif number == 2:
            await asked(reader)
            writer.write(b"+right\r\n")
            await asyncio.sleep(0.05)
            writer.write(b"+stray\r\n")
        else:
            await echo(reader, writer)

    async with served(conduct) as (node, seen):
        with pytest.raises(redis.exceptions.ConnectionError, match="not asked"):
            await node.one(("GET", "a"))
        assert await node.one(("GET", "a")) == b"right"
        await asyncio.sleep(0.2)
        assert await node.one(("ECHO", "mine")) == b"mine"
        assert seen.num_opened == 3


@pytest.mark.parametrize("answer", [b"", b"$10\r\nhalf", b"?what is this\r\n"])
async def test_a_broken_connection_is_told_and_not_used_again(answer: bytes) -> None:
    async def conduct(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if number > 1:
            return await echo(reader, writer)
        await asked(reader)
        writer.write(answer)
        writer.close()
        return None

    async with served(conduct) as (node, _):
        with pytest.raises(redis.exceptions.ConnectionError):
            await node.one(("GET", "a"))
        assert await node.one(("ECHO", "b")) == b"b"


async def test_silence_ends_at_the_limit_and_its_late_answer_is_nobodys() -> None:
    async def conduct(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if number > 1:
            return await echo(reader, writer)
        await asked(reader)
        await asyncio.sleep(0.3)
        writer.write(b"+late\r\n")
        return None

    async with served(conduct, seconds=0.1) as (node, seen):
        with pytest.raises(redis.exceptions.TimeoutError, match=r"within 0\.1 s"):
            await node.one(("GET", "a"))
        assert await node.one(("ECHO", "b")) == b"b"
        assert seen.num_opened == 2


async def test_a_caller_that_leaves_takes_the_answer_with_it() -> None:
    async def conduct(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            await asked(reader)
            await asyncio.sleep(0.1)
            writer.write(b"+of one who left\r\n")
        await echo(reader, writer)

    async with served(conduct) as (node, seen):
        leaver = asyncio.create_task(node.one(("GET", "a")))
        await asyncio.sleep(0.02)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        assert await node.one(("ECHO", "b")) == b"b"
        await asyncio.sleep(0.2)
        assert (seen.num_opened, seen.num_ended) == (2, 1)


async def test_no_more_connections_than_allowed_and_all_come_through() -> None:
    async def conduct(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while text := await asked(reader):
            await asyncio.sleep(0.005)
            writer.write(f"+{text}\r\n".encode())

    async with served(conduct, max_connections=3) as (node, seen):
        answers = await asyncio.gather(*(node.one(("ECHO", str(number))) for number in range(40)))
        assert [int(answer) for answer in answers] == list(range(40))
        assert seen.num_opened == 3


async def test_who_finds_no_free_connection_in_time_is_told() -> None:
    async def conduct(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        await asyncio.sleep(0.25)
        await asked(reader)

    async with served(conduct, max_connections=1, seconds=0.1) as (node, _):
        found = await asyncio.gather(node.one(("GET", "a")), node.one(("GET", "b")), return_exceptions=True)
    assert all(isinstance(error, redis.exceptions.TimeoutError) for error in found)


async def test_a_closed_node_ends_its_connections_and_what_is_asked() -> None:
    async def conduct(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)

    async with served(conduct) as (node, seen):
        asking = asyncio.create_task(node.one(("GET", "a")))
        await asyncio.sleep(0.05)
        await node.close()
        with pytest.raises(redis.exceptions.ConnectionError):
            await asking
        await asyncio.sleep(0.05)
        assert seen.num_ended == 1
