"""Prompt lookup: what followed the last time that the text ended as it does now. Pure.

    ... the red fox jumped ............... the red fox        the newest tokens are found earlier,
            ^^^^^^^ matches                ^^^^^^^^^^^        and what came behind them is proposed: jumped ...

Each sequence keeps an index from every pair of tokens to the places behind it; the longest match among the newest few
places wins, and of equally long ones the newest. Where no pair matches, the newest place behind the last token does.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from engine.speculation.proposal import NOTHING, Grade, Proposal

if TYPE_CHECKING:
    from engine.sequence import Sequence

_KEY_LEN = 2  # tokens of a key of the index
_MAX_MATCH = 16  # a longer match says no more
_MAX_PLACES = 16  # that are looked at, of those behind one pair


class NgramProposer:
    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Sequence, _Index] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, count: int, ahead: Listed[int] = ()) -> Proposal:
        """Graded by the length of the match, 1 to 16."""
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = _Index()
        index.extend(sequence)
        place, match_len = index.longest_match(ahead)
        if not match_len:
            return NOTHING
        return Proposal.graded(index.continuation(place, count, ahead), Grade("text", match_len))


class _Index:
    """The tokens of one sequence, and where each pair of them ends, and each token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}  # pair -> places behind it, ascending
        self._newest: dict[int, int] = {}  # token -> the newest place behind it

    def extend(self, sequence: Sequence) -> None:
        """Takes the tokens that are new since the last time; places behind the newest ones are not listed yet."""
        tokens, places, newest = self._tokens, self._places, self._newest
        start = len(tokens)
        tokens += sequence.tokens(start, sequence.num_tokens)
        for place in range(max(start, 1), len(tokens)):
            last = tokens[place - 1]
            newest[last] = place
            if place >= _KEY_LEN:
                places.setdefault((tokens[place - 2], last), []).append(place)

    def longest_match(self, ahead: Listed[int]) -> tuple[int, int]:
        """(place, how many tokens before it equal the newest ones, `ahead` behind them); (0, 0) where none does."""
        tokens = self._tokens
        end = [*tokens[-_MAX_MATCH:], *ahead]
        best = self._newest.get(end[-1], 0)
        best_len = 1 if best else 0
        if len(end) < _KEY_LEN:
            return best, best_len
        for place in reversed(self._places.get((end[-2], end[-1]), [])[-_MAX_PLACES:]):
            match_len = _KEY_LEN
            most = min(place, _MAX_MATCH, len(end))
            while match_len < most and tokens[place - match_len - 1] == end[-match_len - 1]:
                match_len += 1
            if match_len > best_len:
                best, best_len = place, match_len
                if match_len == _MAX_MATCH:
                    break
        return best, best_len

    def continuation(self, place: int, count: int, ahead: Listed[int]) -> list[int]:
        """`count` tokens from `place` on; a match that reaches the end goes round, as its text would."""
        following = [*self._tokens[place : place + count], *ahead]
        return [following[offset % len(following)] for offset in range(count)]
