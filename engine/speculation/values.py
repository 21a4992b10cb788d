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
_MAX_PROMPT_TOKENS, _MAX_PROMPT_BYTES = 16_384, 65_536  # the newest, which are searched
_MAX_VALUE_BYTES, _MAX_WORD_BYTES = 256, 64  # of a value that is looked up, and of what is taken of the prompt at once
_MAX_TOKENS_AT_ONCE = 64  # of output that came since the last look; before them it is not looked at
_MAX_ENDS, _MAX_NAME_BYTES, _MAX_FORCED_TOKENS = 64, 64, 64  # remembered of one sequence, and of each end


class ValueGuesser:
    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Sequence, _Value] = WeakKeyDictionary()

    def follow(self, sequence: Sequence, matcher: GrammarMatcher) -> None:
        """Takes the output's tokens that are new since the last time."""
        value = self._values.get(sequence)
        if value is None:
            sibling = self._values.get(sequence.request.sequences[0])
            if sibling is None:
                prompt = _Prompt(matcher.text_of(sequence.prompt_token_ids[-_MAX_PROMPT_TOKENS:]))
            else:
                prompt = sibling.prompt
            value = self._values[sequence] = _Value(prompt)
        value.follow(sequence.output_token_ids, matcher)

    def guess(self, sequence: Sequence, matcher: GrammarMatcher, count: int) -> Proposal:
        """At most `count` tokens, where the grammar forces none and the output has been followed.

        Graded by whether the prompt has the value, whether its word goes on there, and whether its end is known.
        """
        value, token_ids = self._values[sequence], sequence.output_token_ids
        if not 0 < len(value.text) <= _MAX_VALUE_BYTES:
            return NOTHING
        rest = value.rest_of_word()
        word = matcher.tokens_of(rest) if rest else []
        word = word[: matcher.num_allowed(token_ids, word)]
        end = value.likely_end(token_ids + word, matcher)
        guessed = (word + end)[:count]
        num_implied = max(0, len(guessed) - len(word) - 1)
        grade = 2 * ((rest is not None) + bool(word)) + (value.is_end_known and bool(end))
        return Proposal(guessed, grade, num_implied=num_implied, source="value")


class _Prompt:
    """Of a request: the text that its sequences copy from."""

    def __init__(self, text: bytes) -> None:
        self._text = _marked(text[-_MAX_PROMPT_BYTES:])
        self._lower_text = self._text.lower()

    def end_of(self, beginning: bytes, start: int) -> int | None:
        """Where words that begin so, in any case, end: from `start` on, or else anywhere."""
        wanted = _marked(beginning).lower()
        found = self._lower_text.find(wanted, start)
        if found < 0:
            found = self._lower_text.find(wanted)
        return None if found < 0 else found + len(wanted)

    def rest_of_word(self, start: int) -> bytes:
        match = _REST_OF_WORD.match(self._text, start, start + _MAX_WORD_BYTES)
        end = match.end() if match else start
        while start < end < len(self._text) and self._text[end] & 0xC0 == 0x80:  # amid a character
            end -= 1
        return self._text[start:end].replace(_MARK, b"")


class _Value:
    """The newest value of one sequence's output, what was forced before it, and how those before it ended."""

    def __init__(self, prompt: _Prompt) -> None:
        self.prompt = prompt
        self.text = bytearray()  # as far as it is written
        self._copied_until = 0  # of the prompt: where the last value that was found there ends
        self._num_looked_at = 0  # places in the output
        self._num_forced = 0  # bytes that come before the value
        self._name = b""  # their last word: mostly a field's name; empty where it is not known
        self._ends: dict[bytes, list[int]] = {}  # name -> what ended its last value, and what was forced; newest last
        self._newest_end: list[int] = []  # of them; what is forced is still being written to it
        self._implied: dict[int, list[int]] = {}  # what may end this value -> what that was found to force

    def follow(self, token_ids: list[int], matcher: GrammarMatcher) -> None:
        first = len(token_ids) + 1 - _MAX_TOKENS_AT_ONCE
        if first > self._num_looked_at:  # what came in between is not known
            self._num_looked_at, self._num_forced = first, 0
            self._begin(b"")
        for place in range(self._num_looked_at, len(token_ids) + 1):
            newest = token_ids[place - 1 : place] if place else []
            piece = matcher.text_of(newest)
            num_forced = min(len(piece), self._num_forced)
            self._num_forced -= num_forced
            self.text += piece[num_forced:]
            if 0 < num_forced == len(piece) and len(self._newest_end) < _MAX_FORCED_TOKENS:
                self._newest_end += newest
            if self._num_forced == 0 and (forced := matcher.forced_text_after(token_ids[:place])):
                if self.text:
                    self._end(newest[0], piece)
                self._begin(_last_word(forced))
                self._num_forced = len(forced)
        self._num_looked_at = len(token_ids) + 1

    def _begin(self, name: bytes) -> None:
        self.text.clear()
        self._implied.clear()
        self._name = name

    def _end(self, token_id: int, piece: bytes) -> None:
        """By this token, if it is one that only ends: no part of a word, behind something else."""
        self._newest_end = []
        value = bytes(self.text[: -len(piece)])
        if not value or not self._name or piece[-1:].isalnum():
            return
        found = self.prompt.end_of(value, self._copied_until) if len(value) <= _MAX_VALUE_BYTES else None
        if found is not None:
            self._copied_until = found
        self._ends.pop(self._name, None)
        self._ends[self._name] = self._newest_end = [token_id]
        if len(self._ends) > _MAX_ENDS:
            del self._ends[next(iter(self._ends))]

    def rest_of_word(self) -> bytes | None:
        """As the prompt has it; None where the prompt does not have the value."""
        found = self.prompt.end_of(bytes(self.text), self._copied_until)
        return None if found is None else self.prompt.rest_of_word(found)

    @property
    def is_end_known(self) -> bool:
        return self._name in self._ends

    def likely_end(self, token_ids: list[int], matcher: GrammarMatcher) -> list[int]:
        """A token that may follow these and end the value, and what is forced behind it; or nothing.

        As at the last value of this name, cut into tokens as the model did; or else a token that ended another name's,
        the newest that is allowed, and the tokenizer's cut of what it forces here.
        """
        known = self._ends.get(self._name)
        if known is not None:
            return known[: matcher.num_allowed(token_ids, known)]
        for end in dict.fromkeys(each[0] for each in reversed(self._ends.values())):
            if matcher.num_allowed(token_ids, [end]):
                if end not in self._implied:  # it may be long: once for each value
                    self._implied[end] = matcher.forced_after([*token_ids, end], _MAX_FORCED_TOKENS)[0]
                found = [end, *self._implied[end]]
                return found[: matcher.num_allowed(token_ids, found)]
        return []


def _last_word(text: bytes) -> bytes:
    found = _LAST_WORD.search(text[-_MAX_NAME_BYTES:])
    return found[0] if found else b""


def _marked(text: bytes) -> bytes:
    return _WORD_START.sub(_MARK, text.replace(_MARK, b" "))
