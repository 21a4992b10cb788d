"""What a grammar leaves no choice about is proposed before anything else. Pure.

    {"name": "Ann", "age": 41}      under its schema, after `{"` nothing but `name": "` may come: certain, and free of
         ^^^^^^^     ^^^^^^^        guesses. What a proposer would say comes behind it, as far as the grammar allows it.

What the proposer says has a rival: how the value may begin, go on and end (`values`).

Known elsewhere as jump-forward decoding; here the tokens are verified like all others, so that they are those that the
model draws under its mask, whichever way a text could be cut into tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.speculation.proposal import CUT, NOTHING, Proposal
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
        """One proposal, or two where there is a grammar that can go back; each of at most `count` tokens."""
        matcher = sequence.matcher
        if matcher is None:
            return [self._proposer.propose(sequence, count)]
        if not matcher.can_go_back:
            return [NOTHING]
        self._values.follow(sequence, matcher)
        forced, num_certain = matcher.forced_after(sequence.output_token_ids, count)
        certain = Proposal.graded(forced[:num_certain], None)
        looked_up = self._proposer.propose(sequence, count - len(forced), forced)
        text = certain + Proposal.graded(forced[num_certain:], CUT) + looked_up
        if len(text.token_ids) > num_certain:
            text = text.first(matcher.num_allowed(sequence.output_token_ids, text.token_ids))
        return [text, self._values.guess(sequence, matcher, count, certain.token_ids)]
