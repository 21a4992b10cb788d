"""What is written to a client within one turn of the loop goes out in one system call.

The server writes an answer's head and body apart; each write on its own is a packet, and a wakeup of the client.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HELD_BYTES = 65_536  # written at once, so that the transport's own bounds hold a writer back


class GatheredProtocol(HttpToolsProtocol):
    """The server's HTTP protocol over a `GatheringTransport`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, GatheringTransport(transport, self.loop)))


class GatheringTransport:
    """A transport that holds what is written until the loop's turn ends, and not longer: streams go out at once."""

    __slots__ = ("_held", "_loop", "_num_held_bytes", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._num_held_bytes = 0

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._num_held_bytes += len(data)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held, self._num_held_bytes = self._held, [], 0
        if held and not self._transport.is_closing():  # the client may have gone meanwhile
            self._transport.writelines(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
