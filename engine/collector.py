"""Joins a request's deltas into its whole output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.outputs import Choice, RequestOutput, Timeline

if TYPE_CHECKING:
    from engine.outputs import RequestDelta
    from engine.plan import PositionLogprobs


class Collector:
    def __init__(self, request_id: str, prompt_token_ids: list[int], num_choices: int) -> None:
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._choices = [Choice(index, [], "", None) for index in range(num_choices)]
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._timeline: Timeline | None = None

    def add(self, delta: RequestDelta) -> None:
        for each in delta.deltas:
            choice = self._choices[each.index]
            choice.token_ids += each.token_ids
            choice.text += each.text
            if each.logprobs is not None:
                choice.logprobs = (choice.logprobs or []) + each.logprobs
                for position in each.logprobs:  # one by one: the same sum, to the bit, however they came
                    choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + position.chosen.logprob
            if each.score is not None:
                choice.score, choice.cumulative_logprob = each.score, each.cumulative_logprob
            if each.finish_reason is not None:
                choice.finish_reason, choice.stop_reason, choice.error = (
                    each.finish_reason,
                    each.stop_reason,
                    each.error,
                )
        self._num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.timeline is not None:
            self._timeline = delta.timeline

    def output(self) -> RequestOutput:
        """The whole, once the last delta is in."""
        if self._timeline is None:
            raise RuntimeError(f"request {self._request_id} has not finished")
        return RequestOutput(
            self._request_id,
            self._prompt_token_ids,
            self._choices,
            len(self._prompt_token_ids),
            self._num_cached_tokens,
            self._prompt_logprobs,
            self._timeline,
        )
