"""How often proposals turn out right, by their source and grade, and by their sequence. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from engine.sequence import Sequence
    from engine.speculation.proposal import Grade

_FIRST_GUESS = 0.6  # of a grade never seen
_GUESS_WEIGHT = 2.0  # in observations
_GRADE_WEIGHT = 8.0  # of a grade's rate beside a sequence's own, in observations
_GRADE_KEEP, _SEQUENCE_KEEP = 0.995, 0.95  # what an observation leaves of the weight of those before it


@dataclass(slots=True)
class _Tally:
    num_right: float = 0.0
    num_seen: float = 0.0

    def add(self, *, is_right: bool, keep: float) -> None:
        self.num_right = self.num_right * keep + is_right
        self.num_seen = self.num_seen * keep + 1.0

    def rate(self, prior: float, prior_weight: float) -> float:
        return (self.num_right + prior * prior_weight) / (self.num_seen + prior_weight)


class AcceptanceRates:
    """Of a token, given that those proposed before it are right. Recent observations weigh more."""

    def __init__(self) -> None:
        self._grades: dict[Grade, _Tally] = {}
        self._sequences: WeakKeyDictionary[Sequence, dict[str, _Tally]] = WeakKeyDictionary()  # by source

    def observe(self, sequence: Sequence, grade: Grade, *, num_right: int, has_wrong: bool) -> None:
        """So many tokens of a proposal were right, and then one was wrong, or none is known to be."""
        tallies = (
            (self._grades.setdefault(grade, _Tally()), _GRADE_KEEP),
            (self._sequences.setdefault(sequence, {}).setdefault(grade.source, _Tally()), _SEQUENCE_KEEP),
        )
        for tally, keep in tallies:
            for _ in range(num_right):
                tally.add(is_right=True, keep=keep)
            if has_wrong:
                tally.add(is_right=False, keep=keep)

    def rate(self, sequence: Sequence, grade: Grade) -> float:
        """Strictly between 0 and 1."""
        prior = self._grades.get(grade, _Tally()).rate(_FIRST_GUESS, _GUESS_WEIGHT)
        return self._sequences.get(sequence, {}).get(grade.source, _Tally()).rate(prior, _GRADE_WEIGHT)
