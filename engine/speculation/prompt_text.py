"""The text of a prompt, in which what an output copies is found, and what stands around it. Pure.

    Olga is 31 and lives in Rio.      found: `31`, which stands behind `is ` and before ` and`
    Lars is 58 and lives in Bergen.   between the next of these: `58`

Known as wrapper induction (Kushmerick, Weld, Doorenbos 1997), from a single example.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MARK = b"\0"  # before each word, so that words are found at their start alone
_WORD_ENDS = rb"(?![\w\x80-\xff])"
_WORD_START = re.compile(rb"(?<![\w\x80-\xff])(?=[\w\x80-\xff])")
_REST_OF_WORD = re.compile(rb"\0?[\w\x80-\xff]*(?:[-.@:/'+&#]\0[\w\x80-\xff]+)*")
_WORDS = re.compile(rb"\0?[\w\x80-\xff]*(?:[-.@:/'+&# ]\0[\w\x80-\xff]+)*")
_BEFORE = re.compile(rb"((?:\0[\w\x80-\xff]+)?)([^\w\x80-\xff\0]*)\Z")  # a word, if any, and what parts it from here
_BEHIND = re.compile(rb"([^\w\x80-\xff\0]*)((?:\0[\w\x80-\xff]+)?)")
_MAX_BYTES = 65_536  # of the text: its end
_MAX_WORD_BYTES = 64  # that are taken at once
_MAX_REACH = 4096  # bytes in which the next value of a kind is looked for


class Span(NamedTuple):
    """Places in the text, which hold one value."""

    begin: int
    end: int
    behind: int = 0  # where the value before it ended: what stands between is its own surroundings


class PromptText:
    def __init__(self, text: bytes) -> None:
        """`text`: in UTF-8; its end may be cut off amid a character."""
        self._text = _marked(text[-_MAX_BYTES:])
        self._lower_text = self._text.lower()

    def find(self, beginning: bytes, start: int) -> Span | None:
        """Words that begin so, in any (ASCII) case: from `start` on, or else anywhere."""
        wanted = _marked(beginning).lower()
        found = self._lower_text.find(wanted, start)
        if found < 0:
            found = self._lower_text.find(wanted)
        return None if found < 0 else Span(found, found + len(wanted))

    def find_whole(self, value: bytes, start: int) -> Span | None:
        """The same of whole words."""
        wanted = re.compile(re.escape(_marked(value).lower()) + _WORD_ENDS)
        found = wanted.search(self._lower_text, start) or wanted.search(self._lower_text)
        return Span(*found.span()) if found else None

    def next_like(self, last: Span, start: int) -> Span | None:
        """The next value from `start` on that has before it what the last one had: a word and marks, or the marks, or
        those on its line.
        """
        word, marks = self._before(last)
        for left in dict.fromkeys((word + marks, marks, marks[max(0, marks.rfind(b"\n")) :])):
            found = self._lower_text.find(left, start, start + _MAX_REACH) if left.strip(b" ") else -1
            if found >= 0 and (end := self.end_like(last, found + len(left))) > found + len(left):
                return Span(found + len(left), end)
        return None

    def end_like(self, last: Span | None, begin: int) -> int:
        """Where a value ends of which this is within: with its word, or with the words before what the last one had
        behind it.
        """
        limit = begin + _MAX_WORD_BYTES
        if last is not None:
            marks, word = self._behind(last.end)
            for right in (marks + word, marks):
                found = self._lower_text.find(right, begin, limit) if right.strip(b" ") else -1
                if found >= 0 and _WORDS.fullmatch(self._text, begin, found):
                    return found
        match = _REST_OF_WORD.match(self._text, begin, limit)
        end = match.end() if match else begin
        while begin < end < len(self._text) and self._text[end] & 0xC0 == 0x80:  # amid a character
            end -= 1
        return end

    def text_of(self, begin: int, end: int) -> bytes:
        return self._text[begin:end].replace(_MARK, b"")

    def _before(self, last: Span) -> tuple[bytes, bytes]:
        """A word and marks. The value before is no such word: another row of a table has another."""
        behind = last.behind if last.behind <= last.begin else 0
        match = _BEFORE.search(self._lower_text, max(behind, last.begin - _MAX_WORD_BYTES), last.begin)
        return (match[1], match[2]) if match else (b"", b"")

    def _behind(self, place: int) -> tuple[bytes, bytes]:
        match = _BEHIND.match(self._lower_text, place, place + _MAX_WORD_BYTES)
        return (match[1], match[2]) if match else (b"", b"")


def _marked(text: bytes) -> bytes:
    return _WORD_START.sub(_MARK, text.replace(_MARK, b" "))
