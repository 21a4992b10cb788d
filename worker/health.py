"""Two answers for whoever looks after a process: whether it lives, and whether it can work.

GET /healthz   200 as long as this event loop turns; nothing is asked of the store, which no restart would mend
GET /readyz    200 where the store answers and takes writes, else 503 with the reason
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from infra.errors import MillstreamError
from infra.store import JobStore

log = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
MAX_REQUEST_BYTES = 16 * 1024


class CannotListen(MillstreamError):
    """The health port cannot be used."""


@contextlib.asynccontextmanager
async def health_served(port: int, store: JobStore, *, setting: str) -> AsyncIterator[None]:
    """Answers on `port` of every address while the block lasts; 0: on none. Raises CannotListen, naming `setting`."""
    if port == 0:
        yield
        return
    try:
        server = await asyncio.start_server(Health(store).serve, port=port, limit=MAX_REQUEST_BYTES)
    except OSError as error:
        raise CannotListen(
            f"{setting}: cannot listen on port {port}: {error.strerror or error}; choose another"
        ) from error
    async with server:
        yield


class Health:
    def __init__(self, store: JobStore) -> None:
        self._store = store

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of one connection, which is closed after the answer."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                status, text = await self._answer(head.split(b"\r\n", 1)[0])
                body = text.encode()
                writer.write(
                    b"HTTP/1.1 %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n"
                    b"Connection: close\r\n\r\n%s" % (status, len(body), body)
                )
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a health check broke off: %r", error)
        finally:
            writer.close()

    async def _answer(self, request_line: bytes) -> tuple[bytes, str]:
        match request_line.split(b" "):
            case [b"GET" | b"HEAD", b"/healthz", *_]:
                return b"200 OK", "ok\n"
            case [b"GET" | b"HEAD", b"/readyz", *_]:
                try:
                    await self._store.ping()
                except MillstreamError as error:
                    return b"503 Service Unavailable", f"{error.message}\n"
                return b"200 OK", "ok\n"
        return b"404 Not Found", "there are /healthz and /readyz\n"
