"""Translates requests in OpenAI's words into ours, refusing what is not supported by its name. Pure."""

from __future__ import annotations

from typing import Any

from api_gateway import fields
from api_gateway.admission import Ask
from api_gateway.errors import NotSupported
from api_gateway.messages import plain_messages
from api_gateway.schemas.chat import ChatRequest
from api_gateway.schemas.completions import CompletionRequest
from api_gateway.schemas.sampling import SamplingFields
from engine.params import Guided, SamplingParams
from infra.errors import BadRequest

MAX_PROMPTS = 128  # of one request; each is a job of its own
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for plain completions
MAX_CACHE_SALT = 256

# Fields whose names and meaning SamplingParams shares.
_SHARED = (
    "n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "prompt_logprobs", "bad_words", "best_of", "use_beam_search", "length_penalty", "early_stopping",
)  # fmt: skip
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def chat_ask(body: ChatRequest) -> Ask:
    _refuse_chat_extras(body)
    guided, guided_name = _guided(body, body.response_format)
    max_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens) and body.max_completion_tokens is not None:
        raise BadRequest(
            f"max_tokens: {body.max_tokens} contradicts max_completion_tokens {body.max_completion_tokens}; send one",
            param="max_tokens",
        )
    params = _sampling(
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=_chat_logprobs(body),
        guided=guided,
    )
    return Ask(
        model=body.model,
        params=params,
        messages=plain_messages(body.messages, "messages"),
        input_name="messages",
        param_names={"logprobs": "top_logprobs", "max_tokens": max_name, "guided": guided_name},
        **_treatment(body),
    )


def completion_asks(body: CompletionRequest) -> list[Ask]:
    """One ask for each prompt, in order."""
    if body.echo:
        raise NotSupported("echo: the prompt is not repeated here; leave it out", param="echo")
    if body.suffix:
        raise NotSupported("suffix: text is not inserted here; leave it out", param="suffix")
    guided, guided_name = _guided(body, None)
    params = _sampling(body, max_tokens=body.max_tokens, logprobs=body.logprobs, guided=guided)
    treatment = _treatment(body)
    return [
        Ask(
            model=body.model,
            params=params,
            input_name=name,
            param_names={"guided": guided_name},
            default_max_tokens=COMPLETION_MAX_TOKENS,
            **prompt,
            **treatment,
        )
        for name, prompt in _prompts(body.prompt)
    ]


def wants_usage_chunk(body: SamplingFields) -> bool:
    """Whether a stream ends with a chunk that has the usage."""
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options: only a stream has options; set stream to true", param="stream_options")
    return bool(body.stream_options and body.stream_options.include_usage)


def _prompts(prompt: str | list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """(how errors call it, the prompt) of each prompt: a text, token ids, texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [("prompt", {"prompt": prompt})]
    if not prompt:
        raise BadRequest("prompt: the list is empty; send at least one prompt", param="prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [("prompt", {"prompt_token_ids": prompt})]
    if len(kinds) > 1:
        raise BadRequest("prompt: the list mixes texts and token ids; send one kind", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise BadRequest(
            f"prompt: {len(prompt)} prompts are too many; send at most {MAX_PROMPTS}, or use POST /v1/jobs/bulk",
            param="prompt",
        )
    kind = "prompt" if kinds == {str} else "prompt_token_ids"
    return [(f"prompt[{index}]", {kind: item}) for index, item in enumerate(prompt)]


def _sampling(
    body: SamplingFields, *, max_tokens: int | None, logprobs: int | None, guided: Guided | None
) -> SamplingParams:
    given = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(stop=stop, max_tokens=max_tokens, logprobs=logprobs, guided=guided, **given)


def _treatment(body: SamplingFields) -> dict[str, Any]:
    if len(body.cache_salt or "") > MAX_CACHE_SALT:
        raise BadRequest(f"cache_salt: send at most {MAX_CACHE_SALT} characters", param="cache_salt")
    return {
        "tier": fields.service_tier(body.service_tier),
        "priority": fields.priority(body.priority),
        "metadata": fields.metadata(body.metadata),
        "cache_salt": body.cache_salt or "",
    }


def _chat_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs: set logprobs to true as well", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _guided(body: SamplingFields, response_format: dict[str, Any] | None) -> tuple[Guided | None, str]:
    """The shape that the output must have, and the field that asks for it."""
    asked = [(name, value) for name in _GUIDED if (value := getattr(body, name)) is not None]
    kind = (response_format or {"type": "text"}).get("type")
    if kind != "text":
        asked.append(("response_format", _schema_of(response_format or {}, kind)))
    if not asked:
        return None, "guided"
    if len(asked) > 1:
        raise BadRequest(f"{asked[1][0]}: {asked[0][0]} shapes the output already; send one", param=asked[1][0])
    name, value = asked[0]
    return Guided(**{_GUIDED.get(name, "json"): value}), name


def _schema_of(response_format: dict[str, Any], kind: Any) -> dict[str, Any]:
    if kind == "json_object":
        return {"type": "object"}
    schema = response_format.get("json_schema")
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return dict(schema["schema"])
    raise BadRequest(
        f"response_format: {str(kind)[:80]!r} is not text, json_object, or json_schema with its json_schema.schema",
        param="response_format",
    )


def _refuse_chat_extras(body: ChatRequest) -> None:
    refused = {
        "tools": bool(body.tools),
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "functions": bool(body.functions),
        "function_call": body.function_call not in (None, "none", "auto"),
        "modalities": body.modalities not in (None, [], ["text"]),
        "audio": body.audio is not None,
        "web_search_options": body.web_search_options is not None,
        "moderation": body.moderation is not None,
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise NotSupported(f"{name} is not supported; leave it out", param=name)
