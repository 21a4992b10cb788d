"""A TCP proxy between our processes, for what signals cannot do: delay, cut, half-open, a reply that gets lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

PIECE_BYTES = 65536


class Proxy:
    """Stands before one server. The faults may be set and taken back at any time."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.delay_seconds = 0.0
        self.is_half_open = False  # connections stay, and carry nothing
        self.bytes_until_cut: Callable[[], int] | None = None  # from the server, of each new connection
        self.drop_reply_to: bytes | None = (
            None  # the reply to the next piece that holds it is lost, with its connection
        )
        self.num_cuts = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def cut(self) -> None:
        """Resets every connection there is."""
        for writer in self._open:
            writer.transport.abort()
        self.num_cuts += 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, there_writer}
        self._open |= pair
        link = _Link(self.bytes_until_cut() if self.bytes_until_cut else None)
        up = asyncio.create_task(self._up(link, reader, there_writer))
        down = asyncio.create_task(self._down(link, there_reader, writer))
        self._tasks |= {up, down}
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        for task in (up, down):
            task.cancel()
        self._tasks -= {up, down}
        self._open -= pair
        for one in pair:
            one.transport.abort()

    async def _up(self, link: _Link, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(PIECE_BYTES):
                await self._hold_up()
                if self.drop_reply_to is not None and self.drop_reply_to in piece:
                    self.drop_reply_to = None
                    link.loses_reply = True
                target.write(piece)
                await target.drain()

    async def _down(self, link: _Link, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(PIECE_BYTES):
                await self._hold_up()
                if link.loses_reply:
                    self.num_cuts += 1
                    return
                if link.bytes_left is not None:
                    piece = piece[: link.bytes_left]
                    link.bytes_left -= len(piece)
                target.write(piece)
                await target.drain()
                if link.bytes_left == 0:
                    self.num_cuts += 1
                    return

    async def _hold_up(self) -> None:
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        while self.is_half_open:  # noqa: ASYNC110 (set from outside)
            await asyncio.sleep(0.02)


class _Link:
    """What is still to happen to one connection."""

    def __init__(self, bytes_left: int | None) -> None:
        self.bytes_left = bytes_left
        self.loses_reply = False


@asynccontextmanager
async def proxy(url: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before `url`, and the URL that goes through it."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    made = Proxy(parts.hostname, parts.port)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    netloc = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    try:
        yield made, urlunsplit(parts._replace(netloc=f"{netloc}127.0.0.1:{made.port}"))
    finally:
        server.close()
        made.cut()
        for task in made._tasks:
            task.cancel()
