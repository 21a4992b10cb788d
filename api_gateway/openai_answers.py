"""Jobs and their events in OpenAI's words. Pure: a whole answer from finished jobs, or chunks from one event."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from api_gateway.fields import SERVICE_TIER_OF
from api_gateway.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    ChunkDelta,
    Logprobs,
    TokenLogprob,
    TopLogprob,
)
from api_gateway.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokensDetails,
    Usage,
)
from api_gateway.views import finite
from infra import contracts
from infra.contracts import Choice, ChoiceDelta, Event, Job, PositionLogprobs, Result, Tier


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of an answer repeats."""

    id: str
    created: int
    model: str
    tier: Tier
    profile: str | None = None  # numerics profile of the worker, once it is known

    def as_fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "service_tier": SERVICE_TIER_OF[self.tier],
            "system_fingerprint": self.profile and f"fp_{hashlib.sha256(self.profile.encode()).hexdigest()[:10]}",
        }


def head_of(job: Job, prefix: str) -> Head:
    """`prefix` makes the id of an answer of the job's id: whoever has one has the other."""
    return Head(f"{prefix}-{job.id}", job.created_ms // 1000, job.spec.model, job.tier, job.profile)


def usage_of(usages: Sequence[contracts.Usage]) -> Usage:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(usage.cached_tokens for usage in usages)),
    )


# --- whole answers ---


def chat_completion(head: Head, result: Result, usage: contracts.Usage) -> ChatCompletion:
    return ChatCompletion(
        **head.as_fields(),
        choices=[
            ChatChoice(
                index=choice.index,
                message=AssistantMessage(content=choice.text),
                logprobs=_chat_logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in result.choices
        ],
        usage=usage_of([usage]),
        prompt_logprobs=_prompt_logprobs(result),
    )


def completion(head: Head, results: Sequence[Result], usages: Sequence[contracts.Usage], n: int) -> Completion:
    """`results` run parallel to the prompts; choice j of prompt i has index `i * n + j`."""
    return Completion(
        **head.as_fields(),
        choices=[
            _completion_choice(index * n, choice, result)
            for index, result in enumerate(results)
            for choice in result.choices
        ],
        usage=usage_of(usages),
    )


def _completion_choice(base: int, choice: Choice, result: Result) -> CompletionChoice:
    return CompletionChoice(
        index=base + choice.index,
        text=choice.text,
        logprobs=_completion_logprobs(choice.logprobs, 0),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        prompt_logprobs=_prompt_logprobs(result),
    )


# --- chunks ---


@dataclass(slots=True)
class ChatChunks:
    """Turns a job's events into chunks. The first chunk of a choice has its role; the last has its finish reason."""

    head: Head
    has_usage: bool  # a last chunk has the usage, and all others say null
    _started: set[int] = field(default_factory=set)

    def of(self, event: Event) -> list[ChatChunk]:
        return [chunk for delta in event.body.deltas for chunk in self._of_delta(delta)]

    def last(self, usage: contracts.Usage) -> list[ChatChunk]:
        return [self._chunk([], usage=usage_of([usage]))] if self.has_usage else []

    def _of_delta(self, delta: ChoiceDelta) -> list[ChatChunk]:
        chunks = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            chunks.append(self._choice(delta.index, ChunkDelta(role="assistant", content="")))
        if delta.text or delta.logprobs:
            content = ChunkDelta(content=delta.text)
            chunks.append(self._choice(delta.index, content, logprobs=_chat_logprobs(delta.logprobs)))
        if delta.finish_reason is not None:
            chunks.append(
                self._choice(
                    delta.index, ChunkDelta(), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
                )
            )
        return chunks

    def _choice(
        self,
        index: int,
        delta: ChunkDelta,
        *,
        logprobs: Logprobs | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> ChatChunk:
        choice = ChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason, stop_reason=stop_reason
        )
        return self._chunk([choice], usage=None if self.has_usage else msgspec.UNSET)

    def _chunk(self, choices: list[ChunkChoice], *, usage: Usage | msgspec.UnsetType | None) -> ChatChunk:
        return ChatChunk(**self.head.as_fields(), choices=choices, usage=usage)


@dataclass(slots=True)
class CompletionChunks:
    """Turns the events of several prompts' jobs into chunks of one answer."""

    head: Head
    n: int
    has_usage: bool
    _offsets: dict[int, int] = field(default_factory=dict)  # choice -> characters of the tokens that were reported

    def of(self, prompt_index: int, event: Event) -> list[Completion]:
        return [
            self._chunk([self._choice(prompt_index * self.n + delta.index, delta)], msgspec.UNSET)
            for delta in event.body.deltas
            if delta.text or delta.logprobs or delta.finish_reason is not None
        ]

    def last(self, usages: Sequence[contracts.Usage]) -> list[Completion]:
        return [self._chunk([], usage_of(usages))] if self.has_usage else []

    def _choice(self, index: int, delta: ChoiceDelta) -> CompletionChoice:
        offset = self._offsets.get(index, 0)
        if delta.logprobs:
            self._offsets[index] = offset + sum(len(position.chosen.token) for position in delta.logprobs)
        return CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=_completion_logprobs(delta.logprobs, offset),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType) -> Completion:
        shown = None if self.has_usage and usage is msgspec.UNSET else usage
        return Completion(**self.head.as_fields(), choices=choices, usage=shown)


# --- logprobs ---


def _chat_logprobs(positions: list[PositionLogprobs] | None) -> Logprobs | None:
    if positions is None:
        return None
    return Logprobs(
        content=[
            TokenLogprob(
                token=position.chosen.token,
                logprob=finite(position.chosen.logprob),
                bytes=list(position.chosen.token.encode()),
                top_logprobs=[_top(token) for token in position.top],
            )
            for position in positions
        ]
    )


def _top(token: contracts.TokenLogprob) -> TopLogprob:
    return TopLogprob(token=token.token, logprob=finite(token.logprob), bytes=list(token.token.encode()))


def _completion_logprobs(positions: list[PositionLogprobs] | None, offset: int) -> CompletionLogprobs | None:
    if positions is None:
        return None
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.chosen.token)
    return CompletionLogprobs(
        tokens=[position.chosen.token for position in positions],
        token_logprobs=[finite(position.chosen.logprob) for position in positions],
        top_logprobs=[{token.token: finite(token.logprob) for token in position.top} for position in positions],
        text_offset=offsets,
    )


def _prompt_logprobs(result: Result) -> list[dict[str, Any] | None] | msgspec.UnsetType:
    """vLLM's form: for each prompt token, what was likely there, by token id; null for the first."""
    if result.prompt_logprobs is None:
        return msgspec.UNSET
    return [None if one is None else _by_token_id(one) for one in result.prompt_logprobs]


def _by_token_id(position: PositionLogprobs) -> dict[str, Any]:
    tokens = [position.chosen, *position.top]
    return {str(one.token_id): {"logprob": finite(one.logprob), "decoded_token": one.token} for one in tokens}
