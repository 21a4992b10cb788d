"""Models as clients see them."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelView(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "millstream"
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    numerics_profile: str
    prefill_tokens_per_s: float | None  # measured, of one worker; null until then
    decode_tokens_per_s: float | None


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelView]
