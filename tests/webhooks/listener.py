"""A real HTTP endpoint on a free port, which answers as its script says and remembers what it was sent."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True)
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = bytes | float  # raw bytes of an answer, or seconds to hang before the connection is dropped


def status(code: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {code} Word", "content-length: 2", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\nok"


class Listener:
    """`answers` are used in turn, the last one for ever; or a function of the number of requests before."""

    def __init__(self, *answers: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.received: list[Received] = []
        self.num_connections = 0
        self._answers = list(answers) or [status(200)]
        self._tls = tls
        self._grown = asyncio.Condition()

    async def __aenter__(self) -> Listener:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}/hook"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:  # fmt: skip
        self._server.close()

    async def wait_for(self, count: int, *, timeout: float = 30.0) -> list[Received]:
        async with asyncio.timeout(timeout), self._grown:
            await self._grown.wait_for(lambda: len(self.received) >= count)
        return self.received

    async def wait_until(self, holds: Callable[[], bool], *, timeout: float = 30.0) -> None:
        async with asyncio.timeout(timeout), self._grown:
            await self._grown.wait_for(holds)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            answer = self._answers[min(len(self.received), len(self._answers) - 1)]
            self.received.append(Received(method, path, headers, body))
            async with self._grown:
                self._grown.notify_all()
            if isinstance(answer, float):
                await asyncio.sleep(answer)
            else:
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away, as some tests want
        finally:
            writer.close()
