"""Where a request belongs in a trace: its own span below the caller's, and one span for each job that it makes."""

from __future__ import annotations

import re
from typing import Any

from litestar import Request

from infra.telemetry import Span

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(header: str | None) -> str | None:
    """A W3C trace context, or None for what is none."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else None


def traceparent_of(request: Request[Any, Any, Any]) -> str | None:
    """The context that this request's work belongs to."""
    span: Span = request.scope["state"]["span"]
    return span.traceparent
