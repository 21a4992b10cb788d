"""Splits a document into chunks of at most so many of the model's own tokens, cut where a reader would cut.

    document   |-------------- chunk 0 --------------|
                                            |-------------- chunk 1 --------------|
                                            | overlap |         fresh             |

The half-open byte ranges cover the document: the first starts at 0, the last ends at its end, and each begins where
the one before ended or `overlap_tokens` earlier. A chunk's text is exactly the document's bytes in its range.
No character is ever split. Time is linear in the document, also for a single line of a megabyte.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from engine.errors import InvalidRequest
from engine.text.borders import Border, find_borders, is_whole
from engine.text.tokenizer import Tokenizer

MIN_CHUNK_TOKENS = 16  # one character can take several tokens; below this a chunk might hold none
_WINDOW = 0.6  # a cut is looked for in the last 40% of a chunk; a better border wins, then a later one
_ENCODE_CHARACTERS = 65_536  # the tokenizer sees at most this much at once, which bounds its memory
_MAX_GRAPHEME = 64  # how far a cut is moved back to keep a visible character whole


@dataclass(frozen=True, slots=True)
class Chunk:
    index: int
    text: str
    start_byte: int
    end_byte: int
    fresh_byte: int  # from here on no earlier chunk holds it; start_byte where there is no overlap
    num_tokens: int  # of `text` alone, without special tokens


def split_document(text: str, tokenizer: Tokenizer, max_tokens: int, overlap_tokens: int = 0) -> list[Chunk]:
    """Chunks of `text`, each of 1 .. `max_tokens` tokens; [] for a text without content.

    Raises InvalidRequest (`max_tokens`, `overlap_tokens`) for sizes that leave no room to go forward.
    """
    if max_tokens < MIN_CHUNK_TOKENS:
        raise InvalidRequest("max_tokens", f"must be at least {MIN_CHUNK_TOKENS}")
    if not 0 <= overlap_tokens <= max_tokens // 2:
        raise InvalidRequest("overlap_tokens", f"must be between 0 and half of max_tokens ({max_tokens // 2})")
    if not text.strip():
        return []
    return _Splitter(text, tokenizer, max_tokens, overlap_tokens).chunks()


class _Splitter:
    """The document with its tokens' places and its borders, both sorted by character offset."""

    def __init__(self, text: str, tokenizer: Tokenizer, max_tokens: int, overlap_tokens: int) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._overlap_tokens = overlap_tokens
        self._token_ends = token_ends(text, tokenizer)
        borders = find_borders(text)
        borders[len(text)] = Border.SECTION
        self._offsets = sorted(borders)
        self._borders = [borders[offset] for offset in self._offsets]

    def chunks(self) -> list[Chunk]:
        found: list[Chunk] = []
        start, fresh, start_byte = 0, 0, 0
        while True:
            end, num_tokens = self._end_of_chunk(start, fresh)
            piece = self._text[start:end]
            fresh_byte = start_byte + len(self._text[start:fresh].encode())
            end_byte = start_byte + len(piece.encode())
            found.append(Chunk(len(found), piece, start_byte, end_byte, fresh_byte, num_tokens))
            if end == len(self._text):
                return found
            start = self._start_after(end, start)
            fresh, start_byte = end, end_byte - len(self._text[start:end].encode())

    def _end_of_chunk(self, start: int, fresh: int) -> tuple[int, int]:
        """(end, tokens) of the chunk that begins at `start` and must pass `fresh`.

        The places of tokens in the whole document only estimate: cut out, a piece may tokenize a little differently.
        So the piece is counted alone, and where it is over, the aim is lowered, by more each time.
        """
        aim, step = self._max_tokens, 1
        while True:
            end = self._best_cut(start, fresh, aim)
            num_tokens = len(self._tokenizer.encode(self._text[start:end], add_special_tokens=False))
            if num_tokens <= self._max_tokens:
                return end, num_tokens
            if aim < 1:
                raise InvalidRequest("max_tokens", f"{self._max_tokens} cannot hold the characters at offset {start}")
            aim -= max(num_tokens - self._max_tokens, step)
            step *= 2

    def _best_cut(self, start: int, fresh: int, aim: int) -> int:
        """The offset in (fresh, limit] to cut at, where about `aim` tokens fit between `start` and the limit."""
        first = bisect_right(self._token_ends, start)
        limit = max(self._fitting(first, max(aim, 1)), fresh + 1)
        if limit == len(self._text):
            return limit
        low = max(fresh, self._token_ends[min(first + int(max(aim, 0) * _WINDOW), len(self._token_ends) - 1)])
        best = self._best_border(min(low, limit), limit)
        return best if best is not None else self._whole_character(limit, fresh)

    def _fitting(self, first: int, count: int) -> int:
        """The last offset before which at most `count` tokens from the token `first` on lie whole."""
        ends, last = self._token_ends, first + count
        if last >= len(ends):
            return len(self._text)
        if ends[last] == ends[last - 1]:  # a character of several tokens would be cut: end before it
            last = bisect_left(ends, ends[last])
        return ends[last - 1] if last else 0

    def _best_border(self, low: int, high: int) -> int | None:
        """The last of the best borders in (low, high]."""
        window = range(bisect_right(self._offsets, low), bisect_right(self._offsets, high))
        best = max(window, key=lambda i: (self._borders[i], i), default=None)
        return None if best is None else self._offsets[best]

    def _whole_character(self, offset: int, floor: int) -> int:
        """`offset` moved back, within reason, so that accents and joined emoji stay together."""
        for candidate in range(offset, max(offset - _MAX_GRAPHEME, floor), -1):
            if is_whole(self._text, candidate):
                return candidate
        return offset

    def _start_after(self, end: int, previous_start: int) -> int:
        """Where the next chunk begins: at a border about `overlap_tokens` before `end`."""
        if not self._overlap_tokens:
            return end
        last = bisect_left(self._token_ends, end)
        low = max(self._token_ends[max(last - self._overlap_tokens, 0)], previous_start + 1)
        window = range(bisect_left(self._offsets, low), bisect_left(self._offsets, end))
        best = max(window, key=lambda i: (min(self._borders[i], Border.SENTENCE), -i), default=None)
        return end if best is None else self._offsets[best]


def token_ends(text: str, tokenizer: Tokenizer) -> list[int]:
    """For each token of `text`, in order, the offset of the character after the last one it touches; never falling."""
    ends: list[int] = []
    start = 0
    while start < len(text):
        stop = start + _ENCODE_CHARACTERS
        if stop < len(text):  # between words if there is a gap near, so that tokens come out as in one go
            gap = max(text.rfind(" ", start + _ENCODE_CHARACTERS // 2, stop), text.rfind("\n", start + 1, stop))
            stop = gap if gap > start else stop
        _, offsets = tokenizer.encode_with_offsets(text[start:stop])
        ends.extend(start + end for _, end in offsets)
        start = stop
    return list(accumulate(ends, max))
