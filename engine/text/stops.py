"""Finds stop strings in a stream of characters, in one pass, whatever their number (Aho-Corasick).

A stop is found at the character that completes it, as if text came one character at a time. So the outcome does not
depend on how the text is cut into tokens. Where several end at the same character, the longest wins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from engine.errors import InvalidRequest

MAX_STOP_CHARACTERS = 65_536  # of one request's stops together; a node each, about 200 bytes


class StopMatch(NamedTuple):
    stop: str
    num_characters: int  # of the fed text up to and including the stop


class StopStrings:
    """The automaton of one set of stops; shared by all choices of a request.

    A node is a prefix of some stop. `depth[node]` is its length: that many characters of text may still become a
    stop, so they are the ones to hold back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest (`stop`) for an empty string or too many characters."""
        if any(not stop for stop in stops):
            raise InvalidRequest("stop", "must not be empty")
        if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
            raise InvalidRequest("stop", f"at most {MAX_STOP_CHARACTERS} characters in all")
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self.children)
        self._link()

    def advance(self, node: int, character: str) -> int:
        """The longest prefix of a stop that the text ends in, after one more character."""
        while node and character not in self.children[node]:
            node = self._fallback[node]
        return self.children[node].get(character, 0)

    def scan(self, node: int, text: str) -> tuple[int, StopMatch | None]:
        """Feeds `text` from `node`: the node it ends in and the first stop completed, if any."""
        for i, character in enumerate(text):
            node = self.advance(node, character)
            stop = self._found[node]
            if stop is not None:
                return node, StopMatch(stop, i + 1)
        return node, None

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self.children[node]:
                self.children[node][character] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self._found.append(None)
            node = self.children[node][character]
        self._found[node] = stop

    def _link(self) -> None:
        """Breadth first: a node's fallback is its parent's fallback advanced by the same character."""
        waiting = deque(self.children[0].values())
        while waiting:
            node = waiting.popleft()
            if self._found[node] is None:
                self._found[node] = self._found[self._fallback[node]]
            for character, child in self.children[node].items():
                self._fallback[child] = self.advance(self._fallback[node], character)
                waiting.append(child)


_in_use: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()


def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these stops, made once for all who use it at a time; it goes with the last of them."""
    found = _in_use.get(stops)
    if found is None:
        found = _in_use[stops] = StopStrings(stops)
    return found
