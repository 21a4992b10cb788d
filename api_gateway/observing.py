"""What happens around every request: an id for it, and its count and time."""

from __future__ import annotations

import secrets
import time
from typing import Any

from litestar.datastructures import MutableScopeHeaders
from litestar.types import ASGIApp, Message, Receive, Scope, Send


async def add_request_id(message: Message, scope: Scope) -> None:
    """Every answer carries an id that the log and a bug report can name."""
    if message["type"] == "http.response.start":
        MutableScopeHeaders.from_message(message)["x-request-id"] = f"req_{secrets.token_hex(12)}"


def observe(app: ASGIApp) -> ASGIApp:
    """Middleware: counts answers by route and status, and times them to their end."""

    async def observed(scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, note_status)
        finally:
            metrics: Any = scope["litestar_app"].state.gateway.metrics
            labels = (scope.get("method", ""), scope.get("path_template", ""))
            metrics.requests.labels(*labels, str(status)).inc()
            metrics.request_seconds.labels(*labels).observe(time.perf_counter() - started)

    return observed
