"""Turns a sequence's ids into text as they come.

No delta holds half a character, nothing is said twice, no stop text is said, and no tail is lost:
the joined deltas are the text of all ids. What a delta must wait for is held back, in two places:

    bytes of an unfinished character  ->  text that may become a stop string  ->  said
         _bytes                                 _held

State depends on the pushed ids alone, so pushing the same ids again gives the same deltas.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.stops import stop_strings
from engine.text.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """One per choice. `push` every output id in order, then `flush` once at the end.

    `stop_reason` is the stop string that was found; from then on nothing more is said.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stops count only in text that begins after `min_tokens` output ids. Raises InvalidRequest for bad stops."""
        self._tokenizer = tokenizer
        self._stops = stop_strings(tuple(stop)) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_pushed = 0
        self._bytes = unfinished_tail(tokenizer, prompt_token_ids)
        self._only_prompt_bytes = bool(self._bytes)  # until an output id adds to them they are not ours to say
        self._node = 0
        self._held = ""
        self.stop_reason: str | None = None

    def push(self, token_id: int) -> str:
        """The text that became certain with this id; often empty."""
        self._num_pushed += 1
        if self.stop_reason is not None or token_id in self._tokenizer.special_ids:
            return ""
        return self._say(self._decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """What was held back, at the end of the sequence; an unfinished character becomes U+FFFD."""
        if self.stop_reason is not None:
            return ""
        tail = "" if self._only_prompt_bytes else self._bytes.decode("utf-8", errors="replace")
        self._bytes = b""
        said = self._say(tail)
        if self.stop_reason is not None:
            return said
        said, self._held, self._node = said + self._held, "", 0
        return said

    def _decode(self, new: bytes) -> str:
        """Whole characters of the held bytes and `new`; what is left waits."""
        if not new:
            return ""
        if self._only_prompt_bytes and not _continues(self._bytes, new):
            self._bytes = b""  # the prompt's broken character stays the prompt's
        self._only_prompt_bytes = False
        text, num_used = codecs.utf_8_decode(self._bytes + new, "replace", False)
        self._bytes = (self._bytes + new)[num_used:]
        return text

    def _say(self, text: str) -> str:
        """Passes `text` through the stops: what is certain to be no part of one."""
        if self._stops is None or self._num_pushed <= self._min_tokens:
            return text
        self._node, match = self._stops.scan(self._node, text)
        pending = self._held + text
        if match is not None:
            self.stop_reason, self._held, self._bytes = match.stop, "", b""
            end = len(pending) - len(text) + match.num_characters
            return pending[: end if self._include_stop else end - len(match.stop)]
        num_certain = len(pending) - self._stops.depth[self._node]
        self._held = pending[num_certain:]
        return pending[:num_certain]


def unfinished_tail(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of `token_ids` that begin a character without finishing it: at most three."""
    tail = b""
    for token_id in reversed(token_ids):
        if token_id not in tokenizer.special_ids:
            tail = tokenizer.token_bytes(token_id) + tail
        if len(tail) >= _MAX_CHARACTER_BYTES:
            break
    _, num_used = codecs.utf_8_decode(tail, "replace", False)
    return tail[num_used:]


def _continues(unfinished: bytes, new: bytes) -> bool:
    """Whether `new` carries on the character that `unfinished` begins."""
    try:
        codecs.utf_8_decode(unfinished + new[:1], "strict", False)
    except UnicodeDecodeError:
        return False
    return True
