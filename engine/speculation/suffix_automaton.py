"""The suffix automaton of many texts at once, extended online and in any order. Pure.

A state stands for all substrings that end at the same places; its link leads to the longest of its suffixes that also
ends elsewhere. N tokens make at most 2N states, and each is added in constant amortized time (Blumer et al., 1985).

    texts: a b c   x b d        states of "b": {ab} -link-> {b} <-link- {xb}        after {b}: c once, d once
"""

from __future__ import annotations

ROOT = 0
_MAX_COUNTED = 32  # suffixes that an added token is counted for, the longest first: a text of one token has as many


class SuffixAutomaton:
    def __init__(self) -> None:
        self.num_tokens = 0  # added so far
        self._next: list[dict[int, int]] = [{}]
        self._links = [ROOT]
        self._lens = [0]
        self._counts = [0]

    @property
    def num_states(self) -> int:
        return len(self._lens)

    def match_len(self, state: int) -> int:
        """Tokens of the state's longest substring."""
        return self._lens[state]

    def extend(self, state: int, token_id: int) -> int:
        """Adds a token behind the text that ends in `state` (ROOT: a new text); returns the state of the longer text.

        Several texts may be extended in turns, each from its own state.
        """
        self.num_tokens += 1
        following = self._next[state].get(token_id)
        added = self._append(state, token_id) if following is None else self._split(state, token_id, following)
        self._count(added)
        return added

    def follow(self, state: int, match_len: int, token_id: int) -> tuple[int, int]:
        """(state, length) of the longest match after one more token, for a text that is not in the automaton."""
        while token_id not in self._next[state]:
            if state == ROOT:
                return ROOT, 0
            state = self._links[state]
            match_len = self._lens[state]
        return self._next[state][token_id], match_len + 1

    def with_continuation(self, state: int) -> int:
        """The state of the longest suffix that something followed; ROOT where nothing ever did."""
        while state != ROOT and not self._next[state]:
            state = self._links[state]
        return state

    def likeliest(self, state: int) -> tuple[int, int, float]:
        """(token, state behind it, its share among what followed); the lower id of equals. Something must follow."""
        following = self._next[state]
        counts = self._counts
        token_id, behind = min(following.items(), key=lambda item: (-counts[item[1]], item[0]))
        return token_id, behind, counts[behind] / sum(counts[each] for each in following.values())

    def _append(self, state: int, token_id: int) -> int:
        added = self._new(self._lens[state] + 1, ROOT, {}, 0)
        place: int | None = state
        while place is not None and token_id not in self._next[place]:
            self._next[place][token_id] = added
            place = self._links[place] if place != ROOT else None
        if place is not None:
            self._links[added] = self._split(place, token_id, self._next[place][token_id])
        return added

    def _split(self, state: int, token_id: int, following: int) -> int:
        """The state of exactly the substrings of `state` with the token behind them."""
        if self._lens[following] == self._lens[state] + 1:
            return following
        copy = self._new(
            self._lens[state] + 1, self._links[following], self._next[following].copy(), self._counts[following]
        )
        self._links[following] = copy
        place: int | None = state
        while place is not None and self._next[place].get(token_id) == following:
            self._next[place][token_id] = copy
            place = self._links[place] if place != ROOT else None
        return copy

    def _new(self, length: int, link: int, following: dict[int, int], count: int) -> int:
        self._next.append(following)
        self._links.append(link)
        self._lens.append(length)
        self._counts.append(count)
        return len(self._lens) - 1

    def _count(self, state: int) -> None:
        for _ in range(_MAX_COUNTED):
            if state == ROOT:
                return
            self._counts[state] += 1
            state = self._links[state]
