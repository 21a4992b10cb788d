"""Single headers of a request, without decoding all of them: that is costly, and few are ever asked for."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.exceptions import ClientException
from litestar.types import Scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """The value of the first header called `name`, which is lower-case; None where there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


class LeanRequest(Request[Any, Any, Any]):
    """The framework's request, which would decode all headers to learn how long the body is."""

    @property
    def content_length(self) -> int | None:
        length = header_of(self.scope, b"content-length")
        try:
            return None if length is None else int(length)
        except ValueError:
            raise ClientException(f"Invalid content-length: {length!r}") from None
