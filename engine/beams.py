"""Beam search: which continuations of one request live on, and which hypotheses it ends with. Pure.

The rules are those of transformers' `generate(num_beams=W, num_return_sequences=W)`. In each step every beam names its
likeliest continuations, and the best K of all of them count, by sum of weights (log-probabilities after processors):

    K = max(2, 1 + number of stop token ids) * W        so at least W of them go on, whatever stop tokens they hold

    ends (stop token, stop string, max_tokens) and among the first W of K   -> a hypothesis; the best W are kept
    ends, but behind those                                                  -> dropped
    goes on                                                                 -> the first W are the next beams

    score of a hypothesis = sum of weights / number of tokens ** length_penalty

The search is over when no candidate goes on, or when there are W hypotheses and, by `early_stopping`,

    True      at once
    False     the best beam, scored at the length it has, does not beat the worst hypothesis
    "never"   the same, scored at the length that suits it best: max_tokens where length_penalty > 0
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.finish import end_of

if TYPE_CHECKING:
    from collections.abc import Sequence as Listed

    from engine.outputs import FinishReason
    from engine.plan import Candidate, PositionLogprobs
    from engine.sequence import Request
    from engine.text.detokenizer import Detokenizer

_LARGEST_EXPONENT = 700.0  # e to this is still a finite number


@dataclass(slots=True)
class Beam:
    """What a beam has gathered beside its tokens, which its sequence holds."""

    weight: float = 0.0  # sum over its tokens
    cumulative_logprob: float = 0.0  # of the raw model distribution
    logprobs: list[PositionLogprobs] | None = None  # one for each token, where they were asked for
    text: Detokenizer | None = None  # where there are stop strings: it finds them


@dataclass(frozen=True, slots=True)
class Hypothesis:
    token_ids: list[int]
    score: float
    cumulative_logprob: float
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason
    stop_reason: int | str | None


class Branch(NamedTuple):
    """The next beam of some place: it goes on from a present one by a token."""

    parent: int
    token_id: int


class BeamSearch:
    """One request's search. Beams are named by place, 0 to width - 1, best first; place i is the request's sequence i.

    `propose` for every place, then `advance`; before the first token there is but place 0.
    """

    def __init__(self, request: Request, text: Detokenizer | None = None) -> None:
        """`text`: where the request has stop strings, what turns tokens into text and finds them."""
        self.width = request.params.num_sequences
        self.num_candidates = max(2, 1 + len(request.stop_token_ids)) * self.width
        self.num_common_tokens = 0  # output tokens that all beams begin with, where they are to be computed again
        self.hypotheses: list[Hypothesis] = []  # best first
        self._request = request
        self._length = 0  # output tokens of each beam
        self._beams = [Beam(logprobs=None if request.params.logprobs is None else [], text=text)]
        self._proposals: dict[int, Listed[Candidate]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether every place has proposed."""
        return len(self._proposals) == (self.width if self._length else 1)

    def propose(self, place: int, candidates: Listed[Candidate]) -> None:
        """The `num_candidates` heaviest continuations of one beam, heaviest first."""
        self._proposals[place] = candidates

    def gather(self, outputs: list[list[int]]) -> None:
        """All beams, whose tokens are `outputs`, are to be computed again from what they share; they propose anew."""
        self._proposals.clear()
        self.num_common_tokens = min(common_len(outputs), max(0, self._length - 1))

    def advance(self, outputs: list[list[int]]) -> list[Branch]:
        """Takes the proposals; returns the next beams, one for each place, or none where the search is over.

        `outputs`: the beams' tokens. Where fewer than `width` beams go on, the places left run along as copies of the
        first, and what they propose is not counted.
        """
        length = self._length = self._length + 1
        ranked = [
            (beam.weight + candidate.weight, place, candidate)
            for place, beam in enumerate(self._beams)
            for candidate in self._proposals[place]
            if candidate.weight > -math.inf
        ]
        ranked.sort(key=lambda entry: -entry[0])  # stable: equal ones by place, then as their beam ranked them
        self._proposals.clear()
        ended: list[Hypothesis] = []
        beams: list[Beam] = []
        branches: list[Branch] = []
        for rank, (weight, parent, candidate) in enumerate(ranked[: self.num_candidates]):
            text, end = self._end_of(self._beams[parent], candidate.token_id)
            if end is None and len(beams) < self.width:
                beams.append(self._grown(parent, candidate, weight, text))
                branches.append(Branch(parent, candidate.token_id))
            elif end is not None and rank < self.width:
                grown = self._grown(parent, candidate, weight, text)
                token_ids = [*outputs[parent], candidate.token_id]
                score = self._score(weight, length)
                ended.append(Hypothesis(token_ids, score, grown.cumulative_logprob, grown.logprobs, *end))
        self.hypotheses = sorted(self.hypotheses + ended, key=lambda each: -each.score)[: self.width]
        if not beams or self._is_decided(beams[0].weight):
            return []
        self._beams = beams
        return branches + [branches[0]] * (self.width - len(branches))

    def _grown(self, parent: int, candidate: Candidate, weight: float, text: Detokenizer | None) -> Beam:
        beam = self._beams[parent]
        logprobs = beam.logprobs
        if logprobs is not None and candidate.logprobs is not None:
            logprobs = [*logprobs, candidate.logprobs]
        return Beam(weight, beam.cumulative_logprob + candidate.logprob, logprobs, text)

    def _end_of(
        self, beam: Beam, token_id: int
    ) -> tuple[Detokenizer | None, tuple[FinishReason, int | str | None] | None]:
        """The beam's text with one more token, and (finish_reason, stop_reason) if it ends there."""
        end = end_of(self._request, token_id, self._length)
        if beam.text is None or (end is not None and end[0] == "stop"):
            return None, end
        text = copy(beam.text)
        text.push(token_id)
        return text, end if text.stop_reason is None else ("stop", text.stop_reason)

    def _is_decided(self, weight: float) -> bool:
        """Whether the search ends although a beam of this weight, the best, could go on."""
        params = self._request.params
        if len(self.hypotheses) < self.width:
            return False
        if params.early_stopping is True:
            return True
        is_longest_best = params.early_stopping == "never" and params.length_penalty > 0
        length = params.max_tokens if is_longest_best and params.max_tokens is not None else self._length
        return self._score(weight, length) <= self.hypotheses[-1].score

    def _score(self, weight: float, length: int) -> float:
        exponent = -self._request.params.length_penalty * math.log(length)
        return weight * math.exp(max(-_LARGEST_EXPONENT, min(exponent, _LARGEST_EXPONENT)))


def common_len(lists: list[list[int]]) -> int:
    """How many first items all have in common."""
    first, last = min(lists), max(lists)  # in lexical order, so all others share at least what these two share
    return next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
