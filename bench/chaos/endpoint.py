"""An HTTP endpoint of the outside world: it answers as badly as its paths say, and remembers what it was sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Endpoint:
    """`behaviour` of a path's first word: `ok`, or a fault at an id's first try and ok after it, or `gone` for ever."""

    port: int = 0
    address: str = ""
    location: str = ""  # where `redirect` sends
    num_connections: int = 0
    requests: list[Request] = field(default_factory=list)
    tries: Counter[str] = field(default_factory=Counter)  # by webhook id

    def url(self, path: str) -> str:
        return f"http://{self.address}:{self.port}/{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            path = head[0].split(" ")[1].lstrip("/")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.requests.append(Request(path, headers, body))
            unique = headers.get("webhook-id", path)
            self.tries[unique] += 1
            await self._answer(path.split("/")[0], self.tries[unique] == 1, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other side gave up, as some behaviours mean it to
        finally:
            writer.close()

    async def _answer(self, behaviour: str, is_first: bool, writer: asyncio.StreamWriter) -> None:
        if behaviour == "gone":
            writer.write(_answer(410))
        elif behaviour == "redirect":
            writer.write(_answer(302, f"location: {self.location}"))
        elif behaviour == "ok" or not is_first:
            writer.write(_answer(200))
        elif behaviour == "error":
            writer.write(_answer(500))
        elif behaviour == "silent":
            await asyncio.sleep(5)
        elif behaviour == "reset":
            writer.transport.abort()
        elif behaviour == "drip":
            for byte in _answer(200):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.2)


def _answer(code: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {code} Word", "content-length: 2", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\nok"


@asynccontextmanager
async def endpoint(address: str = "127.0.0.1", *, port: int = 0) -> AsyncIterator[Endpoint]:
    made = Endpoint()
    server = await asyncio.start_server(made.serve, address, port)
    made.port, made.address = server.sockets[0].getsockname()[1], address
    try:
        yield made
    finally:
        server.close()
