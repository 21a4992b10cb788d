"""What the engine hands back: deltas while a request runs, a whole answer at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.plan import PositionLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class ChoiceDelta:
    """What one step added to one choice. Joined deltas are the whole choice: nothing twice, nothing lost."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[PositionLogprobs] | None = None  # parallel to token_ids where logprobs were asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or the string that stopped it; None for end-of-sequence
    error: str | None = None
    cumulative_logprob: float | None = None  # with a choice that is told whole: of all its tokens, as logprobs are
    score: float | None = None  # with a choice of several candidates: what they were ranked by


@dataclass(slots=True)
class Timeline:
    """Where the time went, in seconds of the engine's clock, and what it cost."""

    queued_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0  # proposals of speculation that were verified
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class RequestDelta:
    """One request's part of one step's outcome."""

    request_id: str
    deltas: list[ChoiceDelta]
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # with the first delta, once, where asked for
    finished: bool = False
    timeline: Timeline | None = None  # with the last delta


@dataclass(slots=True)
class Choice:
    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None  # sum over its tokens; None where no logprobs were asked for or needed
    score: float | None = None  # of beams: see `engine.beams`; of best_of: the mean logprob; choices are in its order
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]  # in index order
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[PositionLogprobs | None] | None
    timeline: Timeline
