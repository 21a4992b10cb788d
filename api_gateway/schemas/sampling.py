"""Fields that the OpenAI routes share: OpenAI's sampling fields, and vLLM's extra ones by vLLM's names.

Unknown fields are refused, so that a misspelt one is never dropped. Fields of the OpenAI API that change nothing here
are taken and ignored; those that would change the answer and are not supported are refused (`api_gateway.openai_asks`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: nothing here depends on a chunk's length


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    # vLLM
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    cache_salt: str | None = None  # narrows which requests share a prefix cache with this one
    # How it is treated
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    # Taken and ignored
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    store: bool | None = None  # every answer is kept as its job for a while, whatever this says
