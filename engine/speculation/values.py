"""Guesses values that a grammar leaves to the model: how they begin, go on and end. Pure.

    {"name": "Ann", "age": 41, "city": "Os         text that is forced ends where a value begins
                                          lo       the rest of it, as the prompt has it
                                            ",     what ended a value here before
                                               "job": "     and what is forced behind that
                                                       cook    what stands in the prompt as the last job did

Whoever extracts copies words of the prompt, but cuts them into tokens otherwise (`"Os`, not ` Os`), begins them in
another case, and puts other things behind them than the prompt does: so they are looked up as text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from engine.speculation.prompt_text import PromptText
from engine.speculation.proposal import CUT, NOTHING, Grade, Proposal

if TYPE_CHECKING:
    from engine.guided.matcher import GrammarMatcher
    from engine.sequence import Sequence
    from engine.speculation.prompt_text import Span

_WORD_CHARACTER = re.compile(rb"[\w\x80-\xff]")
_LAST_WORD = re.compile(rb"[\w\x80-\xff]*[^\w\x80-\xff]*\Z")  # and what stands behind it
_MAX_PROMPT_TOKENS = 16_384  # the newest, which are searched
_MAX_VALUE_BYTES = 256  # of a value that is looked up
_MAX_TOKENS_AT_ONCE = 64  # of output that came since the last look; before them it is not looked at
_MAX_ENDS, _MAX_NAME_BYTES, _MAX_FORCED_TOKENS = 64, 64, 64  # remembered of one sequence, and of each end
_MAX_FORCED_BYTES = 1024  # likewise; behind a longer text no value is guessed
_MAX_VALUES = 16  # that are guessed at once

_BEGINS, _GOES_ON, _ENDS = Grade("begins"), Grade("goes on"), Grade("ends")  # of values that have not begun


class ValueGuesser:
    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Sequence, _Value] = WeakKeyDictionary()

    def follow(self, sequence: Sequence, matcher: GrammarMatcher) -> None:
        """Takes the output's tokens that are new since the last time."""
        value = self._values.get(sequence)
        if value is None:
            sibling = self._values.get(sequence.request.sequences[0])
            if sibling is None:
                prompt = PromptText(matcher.text_of(sequence.prompt_token_ids[-_MAX_PROMPT_TOKENS:]))
            else:
                prompt = sibling.prompt
            value = self._values[sequence] = _Value(prompt)
        value.follow(sequence.output_token_ids, matcher)

    def guess(self, sequence: Sequence, matcher: GrammarMatcher, count: int, certain: list[int]) -> Proposal:
        """At most `count` tokens, where the output has been followed. `certain`: those that must come next."""
        value, written = self._values[sequence], sequence.output_token_ids
        if len(value.text) > _MAX_VALUE_BYTES:
            return NOTHING
        guess = value.rest(written, matcher, count) if value.text else value.beginning(certain, matcher, count)
        guess = guess.first(count)
        guess = guess.first(matcher.num_allowed(written, guess.token_ids))
        return guess if guess.num_certain < len(guess.token_ids) else NOTHING


@dataclass(slots=True)
class _Last:
    """The last value of a name."""

    token_ids: list[int]  # the one that ended it, and those of what was forced behind that, as the model cut them
    forced: bytes | None  # the whole of that text, where it is short
    span: Span | None  # where the prompt has it, or has the newest that it did have
    is_empty: bool  # nothing but its end

    @property
    def end(self) -> Proposal:
        return Proposal.implying(self.token_ids, _ENDS)

    def following(self, matcher: GrammarMatcher) -> tuple[bytes, bytes] | None:
        """The name of the value behind this one, and what is forced before it that no token of these has."""
        if self.forced is None:
            return None
        return _last_word(self.forced), self.forced[len(matcher.text_of(self.token_ids[1:])) :]


class _Value:
    """The newest value of one sequence's output, what was forced before it, and those before it."""

    def __init__(self, prompt: PromptText) -> None:
        self.prompt = prompt
        self.text = bytearray()  # as far as it is written
        self._copied_until = 0  # of the prompt: where the last value that was found there ends
        self._num_looked_at = 0  # places in the output
        self._forced = b""  # what comes before the value
        self._num_forced = 0  # bytes of it that are still to be written
        self._name = b""  # its last word: mostly a field's name; empty where it is not known
        self._lasts: dict[bytes, _Last] = {}  # by name; newest last
        self._newest_end: list[int] = []  # of them; what is forced is still being written to it
        self._forced_by: dict[int, Proposal] = {}  # what may end this value -> what that was found to force

    def follow(self, token_ids: list[int], matcher: GrammarMatcher) -> None:
        first = len(token_ids) + 1 - _MAX_TOKENS_AT_ONCE
        if first > self._num_looked_at:  # what came in between is not known
            self._num_looked_at, self._num_forced, self._newest_end = first, 0, []
            self._begin(b"")
        for place in range(self._num_looked_at, len(token_ids) + 1):
            newest = token_ids[place - 1 : place] if place else []
            piece = matcher.text_of(newest)
            num_forced = min(len(piece), self._num_forced)
            self._num_forced -= num_forced
            if not self._num_forced:
                self._forced = b""
            self.text += piece[num_forced:]
            if 0 < num_forced == len(piece) and len(self._newest_end) < _MAX_FORCED_TOKENS:
                self._newest_end += newest
            if self._num_forced == 0 and (forced := matcher.forced_text_after(token_ids[:place])):
                self._newest_end = []
                if self.text and not num_forced:  # a token that has both is no end that could be repeated
                    self._end(newest[0], piece, forced)
                self._begin(_last_word(forced))
                self._forced, self._num_forced = forced, len(forced)
        self._num_looked_at = len(token_ids) + 1

    def _begin(self, name: bytes) -> None:
        self.text.clear()
        self._forced_by.clear()
        self._name = name

    def _end(self, token_id: int, piece: bytes, forced: bytes) -> None:
        """By this token, if it is one that only ends: no part of a word, behind something else."""
        value = bytes(self.text[: -len(piece)])
        # What stands between two values is none itself. A value may be empty, too: so between quotes, of whatever name.
        is_between = not (self._name.endswith(b'"') or _WORD_CHARACTER.search(self._name))
        if not (value or is_between) or not self._name or piece[-1:].isalnum():
            return
        span = self.prompt.find_whole(value, self._copied_until) if 0 < len(value) <= _MAX_VALUE_BYTES else None
        if span is not None:
            span, self._copied_until = span._replace(behind=self._copied_until), span.end
        self._newest_end = [token_id]
        before = self._lasts.pop(self._name, None)
        self._lasts[self._name] = _Last(
            self._newest_end,
            forced if len(forced) <= _MAX_FORCED_BYTES else None,
            span or (before.span if before else None),
            is_empty=not value,
        )
        if len(self._lasts) > _MAX_ENDS:
            del self._lasts[next(iter(self._lasts))]

    def rest(self, written: list[int], matcher: GrammarMatcher, count: int) -> Proposal:
        """Of a value that has begun, and what comes behind it. Graded by whether the prompt has it, whether it goes on
        there, and whether its end is known.
        """
        last = self._lasts.get(self._name)
        found = self.prompt.find(bytes(self.text), self._copied_until)
        place, word = self._copied_until, []
        if found is not None:
            place = self.prompt.end_like(last.span if last else None, found.end)
            word = matcher.tokens_of(self.prompt.text_of(found.end, place))
            word = word[: matcher.num_allowed(written, word)]
        grade = Grade("value", 2 * ((found is not None) + bool(word)) + (last is not None))
        if last is None:
            return Proposal.graded(word, grade) + self._likely_end(written + word, matcher, grade)
        guess = Proposal.graded(word, grade) + Proposal.implying(last.token_ids, grade)
        if (following := last.following(matcher)) is not None:
            guess += self._records(*following, place, matcher, count - len(guess.token_ids))
        return guess

    def beginning(self, certain: list[int], matcher: GrammarMatcher, count: int) -> Proposal:
        """From a value's beginning on, behind these tokens, which are forced."""
        forced = self._forced[len(self._forced) - self._num_forced :][len(matcher.text_of(certain)) :]
        guess = self._records(self._name, forced, self._copied_until, matcher, count - len(certain))
        return Proposal.graded(certain, None) + guess if guess.token_ids else NOTHING

    def _records(self, name: bytes, forced: bytes, place: int, matcher: GrammarMatcher, count: int) -> Proposal:
        """Values from one of this name on, behind the rest of what is forced before it: those that stand in the prompt
        from this place on as the last ones of their names did.
        """
        guess = NOTHING
        for _ in range(_MAX_VALUES):
            last = self._lasts.get(name)
            if last is None or len(guess.token_ids) >= count:
                break
            text = b""
            if not last.is_empty:
                span = self.prompt.next_like(last.span, place) if last.span else None
                if span is None:
                    break
                place, text = span.end, self.prompt.text_of(span.begin, span.end)
            word = matcher.tokens_of(forced + text)
            guess += Proposal.graded(word[:1], _BEGINS) + Proposal.graded(word[1:], _GOES_ON) + last.end
            if (following := last.following(matcher)) is None:
                break
            name, forced = following
        return guess

    def _likely_end(self, token_ids: list[int], matcher: GrammarMatcher, grade: Grade) -> Proposal:
        """A token that may follow these and end a value of a name that is new, and what is forced behind it; or
        nothing.

        One that ended another name's, the newest that is allowed, and the tokenizer's cut of what it forces here.
        """
        ends = [last.token_ids[0] for last in reversed(self._lasts.values()) if not last.is_empty]
        for end in dict.fromkeys(ends):
            if matcher.num_allowed(token_ids, [end]):
                if end not in self._forced_by:  # it may be long: once for each value
                    forced, num_certain = matcher.forced_after([*token_ids, end], _MAX_FORCED_TOKENS)
                    certain, others = forced[:num_certain], forced[num_certain:]
                    self._forced_by[end] = Proposal.graded(certain, None) + Proposal.graded(others, CUT)
                return Proposal.graded([end], grade) + self._forced_by[end]
        return NOTHING


def _last_word(text: bytes) -> bytes:
    found = _LAST_WORD.search(text[-_MAX_NAME_BYTES:])
    return found[0] if found else b""
