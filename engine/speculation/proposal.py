"""What a proposer hands to the planner, and what a proposer is. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from engine.sequence import Sequence


class Proposal(NamedTuple):
    """Tokens that may follow a sequence's newest one. Guesses: whatever they are, the output stays the same."""

    token_ids: list[int]
    grade: int  # how good the proposer thinks they are; proposals of one grade are accepted about equally often
    num_certain: int = 0  # of the first: nothing else may come
    num_implied: int = 0  # of the last: taken to be as certain as those before them
    source: str = "text"  # what they come from; grades of different sources have nothing in common

    @property
    def num_doubtful(self) -> int:
        """Between the certain and the implied."""
        return len(self.token_ids) - self.num_certain - self.num_implied


NOTHING = Proposal([], 0)


class Proposer(Protocol):
    """Guesses from tokens alone."""

    def propose(self, sequence: Sequence, count: int, ahead: Listed[int] = ()) -> Proposal:
        """At most `count` tokens to follow the sequence's newest one, or to follow it and `ahead`."""
        ...
