"""Single headers of a request, without decoding all of them. Pure."""

from __future__ import annotations

from litestar.types import Scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """The value of the first header called `name`, which is lower-case; None where there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)
