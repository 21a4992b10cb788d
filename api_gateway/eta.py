"""How long a queue takes: pure arithmetic over what was measured. Nothing measured, nothing claimed.

A worker's card carries two measured rates: prompt tokens computed and output tokens drawn per second, over its whole
batch. A job's work is `prompt / prefill rate + output / decode rate` seconds of one worker.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """What one worker does per second."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Size:
    """One job's tokens."""

    prompt_tokens: float
    output_tokens: float

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class TypicalSize:
    """The size of an alias's jobs: a moving average over those that were admitted, recent ones counting more."""

    mean: Size | None = None
    weight: float = 0.05  # of the newest job

    def note(self, size: Size) -> None:
        if self.mean is None:
            self.mean = size
            return
        keep = 1.0 - self.weight
        self.mean = Size(
            prompt_tokens=keep * self.mean.prompt_tokens + self.weight * size.prompt_tokens,
            output_tokens=keep * self.mean.output_tokens + self.weight * size.output_tokens,
        )


def rates_of(prefill_tokens_per_s: float | None, decode_tokens_per_s: float | None) -> Rates | None:
    """The rates, or None until a worker has measured both."""
    if not prefill_tokens_per_s or not decode_tokens_per_s:
        return None
    return Rates(prefill_tokens_per_s, decode_tokens_per_s)


def work_seconds(size: Size, rates: Rates) -> float:
    """What a job keeps one worker busy for."""
    return size.prompt_tokens / rates.prefill_tokens_per_s + size.output_tokens / rates.decode_tokens_per_s


def ahead_tokens(position: int, typical: Size) -> int:
    """Tokens of the waiting jobs ahead."""
    return round(position * typical.tokens)


def first_token_seconds(position: int, own: Size, typical: Size, rates: Rates | None) -> float | None:
    """When the first token of a waiting job may come: the work ahead, then its own prompt. None while unmeasured."""
    if rates is None:
        return None
    return position * work_seconds(typical, rates) + own.prompt_tokens / rates.prefill_tokens_per_s


def backlog_seconds(num_waiting: int, num_running: int, typical: Size | None, rates: Rates | None) -> float:
    """Worker-seconds of work in a queue. At least one second for each job, so that no work looks like none."""
    each = work_seconds(typical, rates) if typical is not None and rates is not None else 1.0
    return (num_waiting + num_running) * max(1.0, each)


def retry_after_seconds(typical: Size | None, rates: Rates | None) -> float:
    """When a full queue has worked off a job, so that a refused one may come in; 1 s where nothing is measured."""
    return 1.0 if typical is None or rates is None else min(60.0, max(1.0, work_seconds(typical, rates)))
