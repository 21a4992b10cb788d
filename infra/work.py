"""Work in tokens, and what finished jobs teach about it. Pure; `lua/lane.lua` repeats `Sizes.note` line by line."""

from __future__ import annotations

from dataclasses import dataclass, fields

from msgspec import Struct


class Work(Struct, frozen=True):  # made often: a frozen dataclass takes several times as long
    """Tokens still to be computed and to be drawn."""

    prompt_tokens: float = 0  # what was emitted before a hand-over is computed again, and counts here
    output_tokens: float = 0  # at most

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens

    def __add__(self, other: Work) -> Work:
        return Work(self.prompt_tokens + other.prompt_tokens, self.output_tokens + other.output_tokens)

    def __sub__(self, other: Work) -> Work:
        return Work(self.prompt_tokens - other.prompt_tokens, self.output_tokens - other.output_tokens)

    def times(self, factor: float) -> Work:
        return Work(self.prompt_tokens * factor, self.output_tokens * factor)


def work_left(cost_tokens: int, output_tokens: int, num_emitted_tokens: int) -> Work:
    """What a job that is not running has before it: it emitted so many of its `output_tokens` in earlier attempts."""
    left = max(0, min(output_tokens, cost_tokens) - num_emitted_tokens)
    return Work(cost_tokens - left, left)


MAX_JOBS = 256  # then all sums are halved, so that the newest jobs count most


@dataclass(slots=True)
class Sizes:
    """Sums over a lane's jobs that succeeded lately. Integers, so that both stores come to the same."""

    jobs: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    asked: int = 0  # output tokens that they might have drawn
    output_squared: int = 0
    output_by_asked: int = 0
    asked_squared: int = 0
    prompt_thought: int = 0  # prompt tokens that they were admitted for: often a guess

    def note(self, *, prompt: int, cached: int, output: int, asked: int, prompt_thought: int) -> None:
        if asked == 0:
            return
        output = min(output, asked)
        new = (1, prompt, cached, output, asked, output * output, output * asked, asked * asked, prompt_thought)
        is_full = self.jobs >= MAX_JOBS
        for field, value in zip(fields(self), new, strict=True):
            known: int = getattr(self, field.name)
            setattr(self, field.name, (known // 2 if is_full else known) + value)

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def output_share(self) -> float:
        """Tokens drawn of those asked for; 1 while nothing is known."""
        return self.output / self.asked if self.asked else 1.0

    @property
    def prompt_share(self) -> float:
        """Prompt tokens that there were of those that jobs were admitted for; 1 while nothing is known."""
        return self.prompt / self.prompt_thought if self.prompt_thought else 1.0

    @property
    def cached_share(self) -> float:
        """Prompt tokens that needed no computing."""
        return min(1.0, self.cached / self.prompt) if self.prompt else 0.0

    @property
    def spread(self) -> float:
        """How far outputs lie from what is expected of them: squared, relative; 0: as expected, 1: memoryless."""
        if not self.output:
            return 0.0
        share = self.output_share
        missed = self.output_squared - 2 * share * self.output_by_asked + share * share * self.asked_squared
        return min(1.0, max(0.0, missed) / (share * share * self.asked_squared))

    @property
    def mean(self) -> Work | None:
        """A typical finished job, by what it was admitted for; None while there is none."""
        return Work(self.prompt_thought / self.jobs, self.asked / self.jobs) if self.jobs else None

    @property
    def computed_share(self) -> float:
        """Prompt tokens that are computed of those that jobs were admitted for."""
        return self.prompt_share * (1 - self.cached_share)

    def expected(self, work: Work) -> Work:
        """What comes of work that was admitted: prompt tokens that are computed, output tokens that are drawn."""
        return Work(work.prompt_tokens * self.computed_share, work.output_tokens * self.output_share)


def as_lua() -> str:
    """The names of the sums, in order, and how many jobs they hold at most."""
    names = ", ".join(f'"size:{field.name}"' for field in fields(Sizes))
    return f"local SIZES = {{{names}}}\nlocal MAX_SIZES = {MAX_JOBS}\n"
