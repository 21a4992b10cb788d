"""Guesses how a value goes on and ends that a grammar leaves to the model. Pure.

    {"name": "Ann", "age": 41, "city": "Os         text that is forced ends where a value begins
                                          lo       the rest of its word, as the prompt has it
                                            ",     what ended a value here before
                                               "job": "     and what is forced behind that

Whoever extracts copies words of the prompt, but cuts them into tokens otherwise (`"Os`, not ` Os`), begins them in
another case, and puts other things behind them than the prompt does: so they are looked up as text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from engine.speculation.proposal import NOTHING, Proposal

if TYPE_CHECKING:
    from engine.guided.matcher import GrammarMatcher
    from engine.sequence import Sequence

_MARK = b"\0"  # before each word of a text that is searched
_WORD_START = re.compile(rb"(?<![\w\x80-\xff])(?=[\w\x80-\xff])")
_REST_OF_WORD = re.compile(rb"\0?[\w\x80-\xff]*(?:[-.@:/'+&#]\0[\w\x80-\xff]+)*")
_LAST_WORD = re.compile(rb"[\w\x80-\xff]*[^\w\x80-\xff]*\Z")  # and what stands behind it
_MAX_PROMPT_TOKENS = 16_384  # the newest, which are searched
_MAX_TOKENS_AT_ONCE = 64  # of output that came since the last guess; before them it is not looked at
_MAX_ENDS, _MAX_NAME_BYTES = 64, 64  # remembered of one sequence


class ValueGuesser:
    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Sequence, _Value] = WeakKeyDictionary()

    def guess(self, sequence: Sequence, matcher: GrammarMatcher, count: int) -> Proposal:
        """At most `count` tokens, where the grammar forces none.

        Graded by whether the prompt has the value, whether its word goes on there, and whether its end is known.
        """
        value = self._values.get(sequence)
        if value is None:
            prompt = matcher.text_of(sequence.prompt_token_ids[-_MAX_PROMPT_TOKENS:])
            value = self._values[sequence] = _Value(prompt)
        token_ids = sequence.output_token_ids
        value.follow(token_ids, matcher)
        if not value.text:
            return NOTHING
        rest = value.rest_of_word()
        word = matcher.tokens_of(rest) if rest else []
        word = word[: matcher.num_allowed(token_ids, word[:count])]
        end = value.likely_end(token_ids + word, matcher) if len(word) < count else []
        guessed = word + end
        implied, _ = matcher.forced_after(token_ids + guessed, count - len(guessed)) if end else ([], 0)
        grade = 2 * ((rest is not None) + bool(word)) + value.is_end_known
        return Proposal(guessed + implied, grade, num_implied=len(implied), source="value")


class _Value:
    """The newest value of one sequence's output, what was forced before it, and how those before it ended."""

    def __init__(self, prompt: bytes) -> None:
        self.text = bytearray()  # as far as it is written
        self._prompt = _marked(prompt)
        self._lower_prompt = self._prompt.lower()
        self._copied_until = 0  # of the prompt: where the last value that was found there ends
        self._num_looked_at = 0  # places in the output
        self._num_forced = 0  # bytes that come before the value
        self._name = b""  # their last word: mostly a field's name
        self._ends: dict[bytes, int] = {}  # name -> the token that ended its last value; newest last

    def follow(self, token_ids: list[int], matcher: GrammarMatcher) -> None:
        """Takes the output's tokens that are new since the last time."""
        first = max(self._num_looked_at, len(token_ids) - _MAX_TOKENS_AT_ONCE)
        for place in range(first, len(token_ids) + 1):
            newest = token_ids[place - 1 : place] if place else []
            piece = matcher.text_of(newest)
            num_forced = min(len(piece), self._num_forced)
            self._num_forced -= num_forced
            self.text += piece[num_forced:]
            if self._num_forced == 0 and (forced := matcher.forced_text_after(token_ids[:place])):
                if 0 < len(piece) < len(self.text):
                    self._end(bytes(self.text[: -len(piece)]), newest[0])
                self.text.clear()
                self._num_forced, self._name = len(forced), _last_word(forced)
        self._num_looked_at = len(token_ids) + 1

    def _end(self, text: bytes, token_id: int) -> None:
        found = self._place_of(text)
        if found is not None:
            self._copied_until = found
        self._ends.pop(self._name, None)
        self._ends[self._name] = token_id
        if len(self._ends) > _MAX_ENDS:
            del self._ends[next(iter(self._ends))]

    def rest_of_word(self) -> bytes | None:
        """As the prompt has it; None where the prompt does not have the value."""
        found = self._place_of(bytes(self.text))
        if found is None:
            return None
        match = _REST_OF_WORD.match(self._prompt, found)
        return match[0].replace(_MARK, b"") if match else b""

    @property
    def is_end_known(self) -> bool:
        return self._name in self._ends

    def likely_end(self, token_ids: list[int], matcher: GrammarMatcher) -> list[int]:
        """The token that ended the last value of this name, or else of any, as far as it may follow these; or none."""
        known = self._ends.get(self._name)
        ends = dict.fromkeys(reversed(self._ends.values())) if known is None else [known]
        return next(([end] for end in ends if matcher.num_allowed(token_ids, [end])), [])

    def _place_of(self, text: bytes) -> int | None:
        """Where it ends in the prompt, whatever its case: behind what was copied last, or else anywhere."""
        wanted = _marked(text).lower()
        start = self._lower_prompt.find(wanted, self._copied_until)
        if start < 0:
            start = self._lower_prompt.find(wanted)
        return None if start < 0 else start + len(wanted)


def _last_word(text: bytes) -> bytes:
    found = _LAST_WORD.search(text[-_MAX_NAME_BYTES:])
    return found[0] if found else b""


def _marked(text: bytes) -> bytes:
    return _WORD_START.sub(_MARK, text.replace(_MARK, b" "))
