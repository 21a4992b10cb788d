"""Every request has an id: its answer carries it as `x-request-id`, and the log names it."""

from __future__ import annotations

import secrets
from typing import Any

from litestar.datastructures import MutableScopeHeaders
from litestar.types import Message, Scope


def request_id(scope: Scope) -> str:
    """The request's id, made on first use."""
    state: dict[str, Any] = scope["state"]
    return str(state.setdefault("request_id", f"req_{secrets.token_hex(12)}"))


async def add_request_id(message: Message, scope: Scope) -> None:
    if message["type"] == "http.response.start":
        MutableScopeHeaders.from_message(message)["x-request-id"] = request_id(scope)
