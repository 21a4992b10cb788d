"""Decides which proposals a step verifies, and learns from what became of them. Pure.

    propose ──> how likely? how dear? ──> K for each sequence ──> rows of 1 + K tokens ──> accepted ──> rates
       |                                                                                                 ^
       +────────── proposals of tokens alone are judged by what came, verified or not ───────────────────+

A drafting model's proposals are not known when the plan is made: its rows hold zeros, which the runner replaces.
"""

from __future__ import annotations

from itertools import accumulate, groupby, takewhile
from operator import mul
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from engine.speculation.acceptance_rates import AcceptanceRates
from engine.speculation.counts import SpeculationCounts
from engine.speculation.depth import DepthChooser, best_depths
from engine.speculation.forced import ForcedFirst
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposal import NOTHING, Grade, Proposal
from engine.speculation.suffix import SuffixProposer

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import EngineConfig
    from engine.costs import StepCosts
    from engine.plan import Row
    from engine.sequence import Sequence
    from engine.speculation.depth import Gains
    from engine.speculation.proposal import Proposer

_PROPOSERS: dict[str, Callable[[], Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}
_BY_MODEL = Grade("model")
_REST = 7  # steps for which a model that is not worth asking is not considered again, as that takes time as well
_FIRST_RETRY, _LAST_RETRY = 32, 1024  # steps without a draft after which one proposal shows whether it pays again


class _Guess(NamedTuple):
    num_tokens: int  # of the sequence when it was made
    proposals: list[Proposal]


class Speculator:
    def __init__(self, config: EngineConfig, costs: StepCosts, max_draft_len: int | None = None) -> None:
        """`max_draft_len`: tokens of context of the model that drafts, where one does."""
        self.counts = SpeculationCounts(config.num_speculative_tokens)
        self._most = config.num_speculative_tokens
        self._is_adaptive = config.speculative_adaptive
        self._costs = costs
        self._max_draft_len = max_draft_len
        self._proposer = ForcedFirst(_PROPOSERS[config.speculative]()) if config.speculative in _PROPOSERS else None
        self._rates = AcceptanceRates()
        self._chooser = DepthChooser()
        self._guesses: WeakKeyDictionary[Sequence, _Guess] = WeakKeyDictionary()
        self._num_to_rest = self._num_idle_steps = 0
        self._retry_after = _FIRST_RETRY

    def propose(self, rows: list[Row], most: int) -> list[list[int]]:
        """Proposals for each of these decoding rows, at most `most` in all; empty lists where none are worth it."""
        if self._num_to_rest:
            self._num_to_rest -= 1
            return [[] for _ in rows]
        likeliest = [self._likeliest(row.sequence) for row in rows]
        offers = [gains for _, gains in likeliest]
        depths = self._adapted(offers, most) if self._is_adaptive else _in_order(offers, most)
        return [proposal.token_ids[:depth] for (proposal, _), depth in zip(likeliest, depths, strict=True)]

    def verified(self, row: Row, *, num_accepted: int, num_drawn: int) -> None:
        """So many of the row's proposals were accepted, and so many tokens became output."""
        num_drafted = row.num_proposals
        self.counts.add(num_drafted=num_drafted, num_accepted=num_accepted, num_drawn=num_drawn)
        request = row.sequence.request
        request.num_drafted_tokens += num_drafted
        request.num_accepted_tokens += num_accepted
        if self._proposer is None:
            self._rates.observe(row.sequence, _BY_MODEL, num_right=num_accepted, has_wrong=num_accepted < num_drafted)

    def _likeliest(self, sequence: Sequence) -> tuple[Proposal, Gains]:
        """Of what is proposed for the sequence, that of which most is expected to be right."""
        if sequence.request.beams is not None:
            return NOTHING, []
        pairs = [(proposal, self._gains(sequence, proposal)) for proposal in self._proposals(sequence)]
        return max(pairs, key=lambda pair: sum(pair[1]))

    def _proposals(self, sequence: Sequence) -> list[Proposal]:
        if self._proposer is None:
            return [Proposal.graded([0] * self._most, _BY_MODEL)]
        guess = self._guesses.pop(sequence, None)
        if guess is not None:
            came = sequence.tokens(guess.num_tokens, sequence.num_tokens)
            for proposal in guess.proposals:
                self._judge(sequence, proposal, came)
        proposals = self._proposer.propose(sequence, self._most)
        self._guesses[sequence] = _Guess(sequence.num_tokens, proposals)
        return proposals

    def _judge(self, sequence: Sequence, proposal: Proposal, came: list[int]) -> None:
        """Whether it was verified or not: the tokens that came say how good it was."""
        is_right = [token_id == right for token_id, right in zip(proposal.token_ids, came, strict=False)]
        num_right = sum(takewhile(bool, is_right))
        judged: list[tuple[Grade, bool]] = []
        for grade, right in zip(proposal.grades[: num_right + 1], is_right, strict=False):
            if grade is not None:
                judged.append((grade, right))
            elif judged and not right:
                judged[-1] = judged[-1][0], False
        for grade, answers in groupby(judged, key=lambda each: each[0]):
            rights = [right for _, right in answers]
            self._rates.observe(sequence, grade, num_right=sum(rights), has_wrong=not all(rights))

    def _gains(self, sequence: Sequence, proposal: Proposal) -> Gains:
        """How likely each of those that may be verified is to be output."""
        if not proposal.token_ids:
            return []
        grades = proposal.grades[: self._count(sequence, len(proposal.token_ids))]
        rates = {grade: self._rates.rate(sequence, grade) for grade in set(grades) if grade is not None}
        return list(accumulate((1.0 if grade is None else rates[grade] for grade in grades), mul))

    def _count(self, sequence: Sequence, count: int) -> int:
        """How many of so many may be verified: the target's own token is output, too."""
        if sequence.matcher is not None and not sequence.matcher.can_go_back:
            return 0  # a wrong one would have the whole output parsed again
        count = min(self._most, count)
        if sequence.params.max_tokens is not None:
            count = min(count, sequence.params.max_tokens - sequence.num_output_tokens - 1)
        if self._max_draft_len is not None:
            count = min(count, self._max_draft_len - sequence.num_computed_tokens)
        return max(0, count)

    def _adapted(self, offers: list[Gains], most: int) -> list[int]:
        most = min(most, sum(map(len, offers)))
        num_sequences = len(offers)
        costs = self._costs
        prefill_token = costs.seconds_per_prefill_token
        seconds = costs.decode_curve.estimates(num_sequences, num_sequences + most, prefill_token)
        if len(seconds) < 2:
            return [0] * num_sequences  # nothing to propose, or no step to compare with
        if self._proposer is not None:
            return self._chooser.choose(offers, most, seconds, 0.0)
        if costs.seconds_per_draft is None:
            return _in_order([gains[:1] for gains in offers], most)
        depths = self._chooser.choose(offers, most, seconds, costs.seconds_per_draft)
        certain = [[1.0] * len(gains) for gains in offers]
        could_pay = any(depths) or any(best_depths(certain, most, seconds, costs.seconds_per_draft))
        if could_pay:
            depths = self._retried(offers, depths)
        if not any(depths):
            self._num_to_rest = _REST
        return depths

    def _retried(self, offers: list[Gains], depths: list[int]) -> list[int]:
        """Where a model has long drafted nothing, nobody knows whether it would be right by now: one draft tells."""
        if any(depths):
            self._num_idle_steps, self._retry_after = 0, _FIRST_RETRY
            return depths
        if self._num_idle_steps < self._retry_after:
            self._num_idle_steps += 1 + _REST  # this one, and those that it is left alone for
            return depths
        self._num_idle_steps, self._retry_after = 0, min(2 * self._retry_after, _LAST_RETRY)
        index = next(index for index, gains in enumerate(offers) if gains)
        depths[index] = 1
        return depths


def _in_order(offers: list[Gains], most: int) -> list[int]:
    """All that is offered, as far as `most` reaches."""
    depths = []
    for gains in offers:
        depths.append(min(len(gains), most))
        most -= depths[-1]
    return depths
