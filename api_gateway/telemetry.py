"""Where a request belongs in a trace."""

from __future__ import annotations

import re
from typing import Any

from litestar import Request

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(request: Request[Any, Any, Any]) -> str | None:
    """The caller's W3C trace context, if it sent a valid one."""
    header = request.headers.get("traceparent", "")
    return header if _TRACEPARENT.fullmatch(header) else None
