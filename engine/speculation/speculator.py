"""Decides which proposals a step verifies, and learns from what became of them. Pure.

    propose ──> how likely? how dear? ──> K for each sequence ──> rows of 1 + K tokens ──> accepted ──> rates
       |                                                                                                 ^
       +────────── proposals of tokens alone are judged by what came, verified or not ───────────────────+

A drafting model's proposals are not known when the plan is made: its rows hold zeros, which the runner replaces.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from engine.speculation.acceptance_rates import AcceptanceRates
from engine.speculation.counts import SpeculationCounts
from engine.speculation.depth import DepthChooser, Offer, best_depths
from engine.speculation.forced import ForcedFirst
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposal import Proposal
from engine.speculation.suffix import SuffixProposer

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import EngineConfig
    from engine.costs import StepCosts
    from engine.plan import Row
    from engine.sequence import Sequence
    from engine.speculation.proposal import Proposer

_PROPOSERS: dict[str, Callable[[], Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}
_NO_OFFER = Offer(0, 0.0)
_BY_MODEL = Proposal([], 0, source="model")  # but for the tokens, which are not known when the plan is made
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
        self._num_idle_steps = 0
        self._retry_after = _FIRST_RETRY

    def propose(self, rows: list[Row], most: int) -> list[list[int]]:
        """Proposals for each of these decoding rows, at most `most` in all; empty lists where none are worth it."""
        likeliest = [self._likeliest(row.sequence) for row in rows]
        proposals, offers = [each for each, _ in likeliest], [offer for _, offer in likeliest]
        depths = self._adapted(offers, most) if self._is_adaptive else _in_order(offers, most)
        return [each.token_ids[:depth] for each, depth in zip(proposals, depths, strict=True)]

    def verified(self, row: Row, *, num_accepted: int, num_drawn: int) -> None:
        """So many of the row's proposals were accepted, and so many tokens became output."""
        num_drafted = row.num_proposals
        self.counts.add(num_drafted=num_drafted, num_accepted=num_accepted, num_drawn=num_drawn)
        request = row.sequence.request
        request.num_drafted_tokens += num_drafted
        request.num_accepted_tokens += num_accepted
        if self._proposer is None:
            has_wrong = num_accepted < num_drafted
            self._observe(row.sequence, _BY_MODEL, num_accepted, has_wrong)

    def _likeliest(self, sequence: Sequence) -> tuple[Proposal, Offer]:
        """Of what is proposed for the sequence, that of which most is expected to be right."""
        pairs = [(proposal, self._offer(sequence, proposal)) for proposal in self._proposals(sequence)]
        return max(pairs, key=lambda pair: sum(pair[1].gains))

    def _proposals(self, sequence: Sequence) -> list[Proposal]:
        if self._proposer is None:
            return [_BY_MODEL._replace(token_ids=[0] * self._most)]
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
        pairs = list(zip(proposal.token_ids, came, strict=False))[: proposal.num_certain + proposal.num_doubtful]
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if num_right >= proposal.num_certain:
            self._observe(sequence, proposal, num_right - proposal.num_certain, num_right < len(pairs))

    def _observe(self, sequence: Sequence, proposal: Proposal, num_right: int, has_wrong: bool) -> None:
        """`num_right`: of the doubtful ones."""
        source, grade = proposal.source, proposal.grade
        self._rates.observe(sequence, source, grade, num_right=num_right, has_wrong=has_wrong)

    def _offer(self, sequence: Sequence, proposal: Proposal) -> Offer:
        count = self._count(sequence, proposal) if proposal.token_ids else 0
        if not count:
            return _NO_OFFER
        rate = self._rates.rate(sequence, proposal.source, proposal.grade)
        return Offer(count, rate, proposal.num_certain, proposal.num_doubtful)

    def _count(self, sequence: Sequence, proposal: Proposal) -> int:
        """How many of the proposals may be verified: the target's own token is output, too."""
        if sequence.request.beams is not None:
            return 0
        if sequence.matcher is not None and not sequence.matcher.can_go_back:
            return 0  # a wrong one would have the whole output parsed again
        count = min(self._most, len(proposal.token_ids))
        if sequence.params.max_tokens is not None:
            count = min(count, sequence.params.max_tokens - sequence.num_output_tokens - 1)
        if self._max_draft_len is not None:
            count = min(count, self._max_draft_len - sequence.num_computed_tokens)
        return max(0, count)

    def _adapted(self, offers: list[Offer], most: int) -> list[int]:
        most = min(most, sum(offer.num_tokens for offer in offers))
        num_sequences = len(offers)
        costs = self._costs
        prefill_token = costs.seconds_per_prefill_token
        seconds = costs.decode_curve.estimates(num_sequences, num_sequences + most, prefill_token)
        if len(seconds) < 2:
            return [0] * num_sequences  # nothing to propose, or no step to compare with
        if self._proposer is not None:
            return self._chooser.choose(offers, most, seconds, 0.0)
        if costs.seconds_per_draft is None:
            return _in_order([offer._replace(num_tokens=min(1, offer.num_tokens)) for offer in offers], most)
        depths = self._chooser.choose(offers, most, seconds, costs.seconds_per_draft)
        certain = [offer._replace(rate=1.0) for offer in offers]
        could_pay = any(depths) or any(best_depths(certain, most, seconds, costs.seconds_per_draft))
        return self._retried(offers, depths) if could_pay else depths

    def _retried(self, offers: list[Offer], depths: list[int]) -> list[int]:
        """Where a model has long drafted nothing, nobody knows whether it would be right by now: one draft tells."""
        if any(depths):
            self._num_idle_steps, self._retry_after = 0, _FIRST_RETRY
            return depths
        self._num_idle_steps += 1
        if self._num_idle_steps < self._retry_after:
            return depths
        self._num_idle_steps, self._retry_after = 0, min(2 * self._retry_after, _LAST_RETRY)
        index = next(index for index, offer in enumerate(offers) if offer.num_tokens)
        depths[index] = 1
        return depths


def _in_order(offers: list[Offer], most: int) -> list[int]:
    """All that is offered, as far as `most` reaches."""
    depths = []
    for offer in offers:
        depths.append(min(offer.num_tokens, most))
        most -= depths[-1]
    return depths
