"""`POST /v1/completions`: what it takes and what it answers, as OpenAI defines them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from api_gateway.schemas.sampling import SamplingFields


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]  # a text, token ids, or a list of either
    logprobs: int | None = None
    echo: bool | None = None  # refused where true
    suffix: str | None = None  # refused where given


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """An answer, or one chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str
    system_fingerprint: str | None
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
