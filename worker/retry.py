"""What becomes of an attempt that went wrong: a pure decision, read from one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Failure(StrEnum):
    REQUEST = "request"  # the caller's fault; the same everywhere and always
    GENERATION = "generation"  # every choice failed by itself: its logits were no numbers, or nothing was left to draw
    ENGINE = "engine"  # the engine broke while the job was in it; whose fault it is, nobody knows
    PAYLOAD = "payload"  # the blob of a large request or result could not be read or written
    MISSING = "missing"  # the blob of a large request is gone
    WEIGHTS = "weights"  # tokens were emitted under other weights, which these never continue
    DRAIN = "drain"  # the worker stops


@dataclass(frozen=True, slots=True)
class Fail:
    """The job ends as failed."""

    code: str


@dataclass(frozen=True, slots=True)
class Retry:
    """The job goes back to its lane and may be claimed after the delay."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class HandOver:
    """The job goes back to its lane, claimable at once: nothing was wrong with it."""


Decision = Fail | Retry | HandOver


@dataclass(frozen=True, slots=True)
class Rule:
    code: str  # of the error, once no try is left
    max_retries: int
    first_delay_seconds: float = 0.0
    factor: float = 1.0  # each delay is so many times the one before


RULES: dict[Failure, Rule] = {
    Failure.REQUEST: Rule("invalid_request", max_retries=0),
    Failure.GENERATION: Rule("generation_error", max_retries=0),
    Failure.ENGINE: Rule("engine_error", max_retries=3, first_delay_seconds=1.0, factor=4.0),
    Failure.PAYLOAD: Rule("payload_unavailable", max_retries=6, first_delay_seconds=1.0, factor=3.0),
    Failure.MISSING: Rule("payload_missing", max_retries=0),
    Failure.WEIGHTS: Rule("weights_changed", max_retries=5, first_delay_seconds=5.0, factor=2.0),
}


def decide(failure: Failure, num_retries: int, *, jitter: float = 0.0) -> Decision:
    """What to do after `failure`, where `num_retries` retries went before.

    `jitter` in [0, 1) stretches the delay by up to a half, so that jobs which failed together do not meet again.
    """
    if failure is Failure.DRAIN:
        return HandOver()
    rule = RULES[failure]
    if num_retries >= rule.max_retries:
        return Fail(rule.code)
    return Retry(rule.first_delay_seconds * rule.factor**num_retries * (1.0 + jitter / 2.0))
