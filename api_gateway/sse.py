"""Server-sent events: frames, and the response that carries them until the client hangs up or the stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from api_gateway.tasks import end

log = logging.getLogger("millstream.gateway")

KEEPALIVE = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"

HangUp = Callable[[], Awaitable[None]]


def frame(data: Any, *, event: str | None = None, id: int | None = None) -> bytes:
    """One event. JSON has no line breaks of its own, so one `data:` line holds it."""
    head = b"" if id is None else b"id: %d\n" % id
    if event is not None:
        head += b"event: %s\n" % event.encode()
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response[bytes]):
    """Sends the frames of a generator. `on_hang_up` is awaited when the client leaves before the end."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        headers: dict[str, str] | None = None,
        on_hang_up: HangUp | None = None,
        gauge: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(content=b"", media_type="text/event-stream", headers=headers)
        self.frames = frames
        self.on_hang_up = on_hang_up
        self.gauge = gauge or contextlib.nullcontext()

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIResponse:
        return _Answer(self)


class _Answer(ASGIResponse):
    """An event stream under way. The framework's own neither ends generators for sure nor tells of hang-ups."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__(headers=stream.headers, media_type=stream.media_type)
        self.stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.stream.gauge:
            sender = asyncio.create_task(self._send(send))
            listener = asyncio.create_task(until_hang_up(receive))
            try:
                await asyncio.wait({sender, listener}, return_when=asyncio.FIRST_COMPLETED)
                hung_up = not sender.done()
            finally:
                await end(sender, listener)
                _report(sender)
                await self.stream.frames.aclose()
        if hung_up and self.stream.on_hang_up is not None:
            await self.stream.on_hang_up()

    async def _send(self, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # proxies that gather an answer before they pass it on would hold back tokens
            **self.stream.headers,
        }
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        async for piece in self.stream.frames:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_hang_up(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _report(sender: asyncio.Task[None]) -> None:
    if not sender.cancelled() and (error := sender.exception()) is not None:
        log.error("a stream broke off", exc_info=error)
