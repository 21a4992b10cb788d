"""What happens around every request: its span, its count and its time."""

from __future__ import annotations

import time
from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from api_gateway.auth import Middleware
from api_gateway.headers import header_of
from api_gateway.metrics import Metrics
from api_gateway.telemetry import valid_traceparent
from infra.errors import MillstreamError
from infra.telemetry import Telemetry


def observing(telemetry: Telemetry, metrics: Metrics) -> Middleware:
    """Middleware: a span, a count by route and status, and the time until the answer's end."""

    def observe(app: ASGIApp) -> ASGIApp:
        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            route: tuple[str, str] = scope["method"], scope["path_template"]  # type: ignore[typeddict-item]
            state: dict[str, Any] = scope["state"]
            started, status = time.perf_counter(), 0

            async def note_status(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            with telemetry.span(
                " ".join(route),
                kind="server",
                parent=valid_traceparent(header_of(scope, b"traceparent")),
                attributes={"http.request.method": route[0], "http.route": route[1]},
            ) as span:
                state["span"] = span
                try:
                    await app(scope, receive, note_status)
                except MillstreamError as error:  # refused before any route: whoever is around us answers
                    status = error.status
                    raise
                finally:
                    span.set({"http.response.status_code": status})
                    if status >= 500:
                        span.fail(str(status))
                    metrics.requests(*route, str(status)).inc()
                    metrics.request_seconds(*route).observe(time.perf_counter() - started)

        return observed

    return observe
