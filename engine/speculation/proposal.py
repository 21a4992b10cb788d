"""What a proposer hands to the planner, and what a proposer is. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from engine.sequence import Sequence


class Grade(NamedTuple):
    """How good a token is thought to be, given those before it: of one grade all are right, with what they imply, about
    equally often.
    """

    source: str  # what it comes from
    level: int = 0  # levels of different sources have nothing in common


CUT = Grade("cut")  # of the end of a forced text, which may be cut otherwise with what comes behind it


class Proposal(NamedTuple):
    """Tokens that may follow a sequence's newest one. Guesses: whatever they are, the output stays the same."""

    token_ids: list[int]
    grades: list[Grade | None]  # of each; None where the one before it implies it, or nothing else may come

    @classmethod
    def graded(cls, token_ids: list[int], grade: Grade | None) -> Proposal:
        return cls(token_ids, [grade] * len(token_ids))

    @classmethod
    def implying(cls, token_ids: list[int], grade: Grade) -> Proposal:
        """The first, if there is any, implies those behind it."""
        return cls.graded(token_ids[:1], grade) + cls.graded(token_ids[1:], None)

    def __add__(self, other: Proposal) -> Proposal:  # type: ignore[override]
        return Proposal(self.token_ids + other.token_ids, self.grades + other.grades)

    def first(self, count: int) -> Proposal:
        return Proposal(self.token_ids[:count], self.grades[:count])

    @property
    def num_certain(self) -> int:
        """Of the first: nothing else may come."""
        return sum(1 for _ in takewhile(lambda grade: grade is None, self.grades))


NOTHING = Proposal([], [])


class Proposer(Protocol):
    """Guesses from tokens alone."""

    def propose(self, sequence: Sequence, count: int, ahead: Listed[int] = ()) -> Proposal:
        """At most `count` tokens to follow the sequence's newest one, or to follow it and `ahead`."""
        ...
