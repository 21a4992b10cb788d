"""Every request has an id: its answer carries it as `x-request-id`, and the log names it."""

from __future__ import annotations

import random
from typing import Any

from litestar.types import Message, Scope


def request_id(scope: Scope) -> str:
    """The request's id, made on first use."""
    state: dict[str, Any] = scope["state"]
    if "request_id" not in state:
        state["request_id"] = f"req_{random.getrandbits(96):024x}"  # to be told apart, not to be kept secret
    return str(state["request_id"])


async def add_request_id(message: Message, scope: Scope) -> None:
    if message["type"] == "http.response.start":
        message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id(scope).encode())]
