"""Turns chat messages as clients write them into the text messages that models are given. Pure."""

from __future__ import annotations

from typing import Any

from api_gateway.errors import NotSupported
from api_gateway.schemas.messages import MessageIn
from infra.contracts import Message
from infra.errors import BadRequest

# What a client's role means to a chat template. `developer` is the newer name of `system`.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_MUST_BE_EMPTY = ("refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_id")


def plain_messages(messages: list[MessageIn], name: str) -> list[Message]:
    """The messages as plain text. `name` is what the caller calls the list."""
    return [_plain(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def _plain(message: MessageIn, where: str) -> Message:
    if message.role in ("tool", "function"):
        raise NotSupported(
            f"{where}.role: {message.role!r}: tools are not supported; write the result into a user message",
            param=f"{where}.role",
        )
    role = ROLES.get(message.role)
    if role is None:
        raise BadRequest(
            f"{where}.role: {message.role[:80]!r} is not a role; use {', '.join(ROLES)}", param=f"{where}.role"
        )
    for field in _MUST_BE_EMPTY:
        if getattr(message, field):
            raise NotSupported(f"{where}.{field} is not supported; leave it out", param=f"{where}.{field}")
    return Message(role=role, content=_text(message.content, f"{where}.content"), name=message.name)


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise BadRequest(f"{where} is missing; send a text", param=where)
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: dict[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise NotSupported(
            f"{where}.type: {str(kind)[:80]!r} is not supported; send parts of type text", param=f"{where}.type"
        )
    if not isinstance(text, str):
        raise BadRequest(f"{where}.text is missing; a part of type text has one", param=f"{where}.text")
    return text
