"""What a grammar leaves no choice about is proposed before anything else. Pure.

    {"name": "Ann", "age": 41}      under its schema, after `{"` nothing but `name": "` may come: certain, and free of
         ^^^^^^^     ^^^^^^^        guesses. What a proposer would say comes behind it, as far as the grammar allows it.

Where nothing is forced, what the proposer says has a rival: how the value may go on and end (`values`).

Known elsewhere as jump-forward decoding; here the tokens are verified like all others, so that they are those that the
model draws under its mask, whichever way a text could be cut into tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.speculation.proposal import NOTHING, Proposal
from engine.speculation.values import ValueGuesser

if TYPE_CHECKING:
    from engine.sequence import Sequence
    from engine.speculation.proposal import Proposer


class ForcedFirst:
    """A proposer that asks the grammar first, where the sequence has one."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._values = ValueGuesser()

    def propose(self, sequence: Sequence, count: int) -> list[Proposal]:
        """One proposal, or two where a grammar forces nothing here; each of at most `count` tokens."""
        matcher = sequence.matcher
        if matcher is None:
            return [self._proposer.propose(sequence, count)]
        if not matcher.can_go_back:
            return [NOTHING]
        self._values.follow(sequence, matcher)
        forced, num_certain = matcher.forced_after(sequence.output_token_ids, count)
        guess = self._proposer.propose(sequence, count - len(forced), forced)
        token_ids = forced + guess.token_ids
        if len(token_ids) > num_certain:
            token_ids = token_ids[: matcher.num_allowed(sequence.output_token_ids, token_ids)]
        proposal = Proposal(token_ids, guess.grade, min(num_certain, len(token_ids)))
        return [proposal] if forced else [proposal, self._values.guess(sequence, matcher, count)]
