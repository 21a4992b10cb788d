"""What a job has emitted so far, over all its attempts: restored from its events, extended by the engine's deltas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from infra.contracts import Choice, ChoiceDelta, Event, PositionLogprobs, Result, Usage


def joined(first: ChoiceDelta, second: ChoiceDelta) -> ChoiceDelta:
    """Two deltas of one choice, one after the other, as one."""
    if first.finish_reason is not None:
        raise ValueError(f"choice {first.index} has finished; nothing can follow")
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or []), *(second.logprobs or [])]
    return ChoiceDelta(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        cumulative_logprob=second.cumulative_logprob,
        score=second.score,
    )


@dataclass(slots=True)
class ChoiceProgress:
    index: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    score: float | None = None

    def extend(self, delta: ChoiceDelta) -> None:
        if self.finish_reason is not None:
            raise ValueError(f"choice {self.index} has finished; nothing can follow")
        self.token_ids.extend(delta.token_ids)
        self.texts.append(delta.text)
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *delta.logprobs]
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.cumulative_logprob, self.score = delta.cumulative_logprob, delta.score

    def as_choice(self) -> Choice:
        return Choice(
            index=self.index,
            text="".join(self.texts),
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
            cumulative_logprob=self.cumulative_logprob,
            score=self.score,
        )


@dataclass(slots=True)
class Progress:
    choices: list[ChoiceProgress]
    num_prompt_tokens: int | None = None  # None until an attempt has counted them
    num_cached_tokens: int | None = None  # of the attempt that came first: later ones find other caches
    prompt_logprobs: list[PositionLogprobs | None] | None = None

    @classmethod
    def of(cls, num_choices: int, history: Iterable[Event] = ()) -> Progress:
        """Nothing yet, or what the events of earlier attempts say; their choices are there in any case."""
        events = list(history)
        told = {delta.index + 1 for event in events for delta in event.body.deltas}
        progress = cls([ChoiceProgress(index) for index in range(max(told | {num_choices}))])
        for event in events:
            body = event.body
            if body.num_prompt_tokens is not None:
                progress.count_prompt(body.num_prompt_tokens, body.num_cached_tokens or 0)
            for delta in body.deltas:
                progress.choices[delta.index].extend(delta)
        return progress

    def count_prompt(self, num_prompt_tokens: int, num_cached_tokens: int) -> bool:
        """Notes the prompt's length. False where it was known."""
        if self.num_prompt_tokens is not None:
            return False
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = num_cached_tokens
        return True

    @property
    def emitted(self) -> list[list[int]]:
        """Token ids per choice."""
        return [choice.token_ids for choice in self.choices]

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens or 0,
            completion_tokens=self.num_completion_tokens,
            cached_tokens=self.num_cached_tokens or 0,
        )

    @property
    def result(self) -> Result:
        return Result(choices=[choice.as_choice() for choice in self.choices], prompt_logprobs=self.prompt_logprobs)
