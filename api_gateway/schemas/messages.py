"""Chat messages as clients write them."""

from __future__ import annotations

from typing import Any

import msgspec


class MessageIn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. The fields below `name` are what clients send back of an earlier answer; they must be empty."""

    role: str
    content: str | list[dict[str, Any]] | None = None  # a text, or parts {"type": "text", "text": ...}
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
