"""Where one output stands in its grammar: which tokens may come next.

What a matcher is asked about is a list of tokens, never "the next one": it goes back and on by itself from where it was
last asked. So a preempted, continued or forked sequence and a proposal that may be withdrawn need no bookkeeping.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

Allowed = npt.NDArray[np.bool_]  # by token id; ids beyond its end are not allowed

_NOTHING: Allowed = np.zeros(0, dtype=bool)
_NUM_KEPT = 16  # answers: as many as a step asks for, which may be asked for twice


class GrammarMatcher:
    """Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
        self.error: str | None = None  # why nothing is allowed any more, where that is not the grammar's own end
        self._matcher, self._vocabulary = matcher, vocabulary
        self._consumed: list[int] = []
        self._answers: dict[int, Allowed] = {}  # by how many of the consumed tokens they are about

    def allowed_after(self, token_ids: list[int]) -> Allowed:
        """What may follow these tokens, the end of sequence included where the grammar may end.

        Nothing may follow tokens that the grammar does not know, and nothing once a limit was met: `error` says which.
        """
        num_shared = _num_shared(token_ids, self._consumed)
        if num_shared == len(token_ids) and num_shared in self._answers:
            return self._answers[num_shared]
        if not self._go_to(token_ids):
            return _NOTHING
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._note_error()
        allowed = _NOTHING if self.error else np.unpackbits(bits, bitorder="little").view(bool)
        self._answers[len(token_ids)] = allowed
        while len(self._answers) > _NUM_KEPT:
            del self._answers[next(iter(self._answers))]
        return allowed

    def forced_after(self, token_ids: list[int]) -> tuple[list[int], int]:
        """(tokens, how many of them are certain): the text that alone may follow, as the model would cut it.

        Behind the certain ones stand those of the text's end, which may be cut otherwise with what comes behind it.
        """
        if not self._go_to(token_ids):
            return [], 0
        certain = self._matcher.compute_ff_tokens()
        cut = self._vocabulary.tokenize_bytes(self._matcher.compute_ff_bytes())
        return (cut if cut[: len(certain)] == certain else certain), len(certain)

    def num_allowed(self, token_ids: list[int], following: list[int]) -> int:
        """How many of those that would follow these tokens may."""
        return self._matcher.validate_tokens(following) if self._go_to(token_ids) else 0

    def _go_to(self, token_ids: list[int]) -> bool:
        """Whether the grammar knows these tokens, and then the matcher stands behind them."""
        num_shared = _num_shared(token_ids, self._consumed)
        self._go_back_to(num_shared)
        return self._consume(token_ids[num_shared:]) and not self.error

    def _go_back_to(self, num_tokens: int) -> None:
        if num_tokens < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - num_tokens)
            del self._consumed[num_tokens:]
            self._answers = {count: each for count, each in self._answers.items() if count <= num_tokens}

    def _consume(self, token_ids: list[int]) -> bool:
        """Whether the grammar knows them all; stays before the first that it does not."""
        if not token_ids:
            return True
        num_taken = self._matcher.try_consume_tokens(token_ids)
        self._consumed += token_ids[:num_taken]
        if num_taken < len(token_ids):
            self._note_error()
        return num_taken == len(token_ids)

    def _note_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = f"the output's grammar is too complex here: {self._matcher.get_error()[:200]}"


def _num_shared(ours: list[int], theirs: list[int]) -> int:
    """Length of the common beginning."""
    least = min(len(ours), len(theirs))
    if ours[:least] == theirs[:least]:
        return least
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
