"""The one shape of every error body."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str  # what is wrong, where, and what to do
    type: str
    param: str | None  # the field's name as the caller wrote it
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    error: ErrorDetail
