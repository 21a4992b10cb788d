"""Where one output stands in its grammar: which tokens may come next, and which must.

What a matcher is asked about is a list of tokens, never "the next one": it goes back and on by itself from where it was
last asked. So a preempted, continued or forked sequence and a proposal that may be withdrawn need no bookkeeping.
Where a grammar counts its tokens, going back is to begin anew (`can_go_back`).
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

    def __init__(
        self, beginning: LLMatcher, vocabulary: LLTokenizer, num_tokens: int, *, can_go_back: bool = True
    ) -> None:
        """`beginning` stays as it is. num_tokens: those that a sequence may hold; the vocabulary may know more.

        can_go_back: whether what may follow depends on the tokens alone. Where limits are counted it also depends on
        the places that were asked about on the way: then all are, and going back means to begin anew.
        """
        self.error: str | None = None  # why nothing was allowed at some place, where that is not the grammar's own end
        self.can_go_back = can_go_back
        self._beginning, self._vocabulary, self._num_tokens = beginning, vocabulary, num_tokens
        self._matcher = beginning.deep_copy()
        self._consumed: list[int] = []
        self._answers: dict[int, Allowed] = {}  # by how many of the consumed tokens they are about
        self._forced: tuple[list[int], list[int]] = [], []  # what was forced last, and behind which tokens

    def allowed_after(self, token_ids: list[int]) -> Allowed:
        """What may follow these tokens, the end of sequence included where the grammar may end.

        Nothing may follow tokens that the grammar does not know, or where a limit is met: `error` then says which.
        """
        num_shared = _num_shared(token_ids, self._consumed)
        if num_shared == len(token_ids) and num_shared in self._answers:
            return self._answers[num_shared]
        self.error = None
        if not self._go_to(token_ids):
            return _NOTHING
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._has_failed():
            return _NOTHING
        allowed = np.unpackbits(bits, bitorder="little").view(bool)
        self._answers[len(token_ids)] = allowed
        while len(self._answers) > _NUM_KEPT:
            del self._answers[next(iter(self._answers))]
        return allowed

    def forced_after(self, token_ids: list[int], count: int) -> tuple[list[int], int]:
        """(at most `count` tokens, how many of them are certain): the text that alone may follow, as the model would
        cut it.

        Behind the certain ones stand those of the text's end, which may be cut otherwise with what comes behind it.
        """
        certain = self._certain_after(token_ids, count)
        if certain is None:
            return [], 0
        own = self._own(certain)[:count]
        if len(own) < len(certain) or len(own) == count:
            return own, len(own)
        cut = self.tokens_of(self._matcher.compute_ff_bytes())
        return (cut if cut[: len(own)] == own else own)[:count], len(own)

    def forced_text_after(self, token_ids: list[int]) -> bytes:
        """The text that alone may follow these tokens, in UTF-8."""
        if not self._go_to(token_ids):
            return b""
        text = self._matcher.compute_ff_bytes()
        return b"" if self._has_failed() else text

    def text_of(self, token_ids: list[int]) -> bytes:
        return self._vocabulary.decode_bytes(token_ids)

    def tokens_of(self, text: bytes) -> list[int]:
        """As the tokenizer cuts it, up to the first token that no sequence may hold."""
        return self._own(self._vocabulary.tokenize_bytes(text))

    def may_follow(self, token_ids: list[int], token_id: int) -> bool:
        """Whether the mask behind these tokens has this one, for less than the mask costs.

        No, too, where only the mask can tell: at an end of the grammar, and where a limit is met.
        """
        certain = self._certain_after(token_ids, 1)
        if certain is None:
            return False
        if not certain:
            return self.num_allowed(token_ids, [token_id]) == 1
        return certain[0] == token_id  # the only cut in the mask, though the grammar would take others as well

    def num_allowed(self, token_ids: list[int], following: list[int]) -> int:
        """How many of those that would follow these tokens may."""
        if not self._go_to(token_ids):
            return 0
        num_allowed = self._matcher.validate_tokens(self._own(following))
        return 0 if self._has_failed() else num_allowed

    def _certain_after(self, token_ids: list[int], count: int) -> list[int] | None:
        """The tokens that alone may follow, or the next `count` of them, at least.

        None where these tokens are not the grammar's, or a limit is met. The matcher stands behind them where there
        are fewer than `count`.
        """
        if (known := self._known_to_follow(token_ids, count)) is not None:
            return known
        if not self._go_to(token_ids):
            return None
        certain = self._matcher.compute_ff_tokens()
        if self._has_failed():
            return None
        self._forced = list(token_ids), certain
        return certain

    def _known_to_follow(self, token_ids: list[int], count: int) -> list[int] | None:
        """`count` tokens of what was forced last, where these tokens have gone that way: a long text is cut once."""
        before, certain = self._forced
        num_gone = len(token_ids) - len(before)
        if not 0 <= num_gone <= len(certain) - count or token_ids != before + certain[:num_gone]:
            return None
        return certain[num_gone : num_gone + count]

    def _own(self, token_ids: list[int]) -> list[int]:
        """Up to the first that no sequence may hold."""
        return list(takewhile(lambda token_id: token_id < self._num_tokens, token_ids))

    def _go_to(self, token_ids: list[int]) -> bool:
        """Whether the grammar knows these tokens, and then the matcher stands behind them."""
        num_shared = _num_shared(token_ids, self._consumed)
        if num_shared < len(self._consumed):
            if self.can_go_back and self._matcher.rollback(len(self._consumed) - num_shared):
                del self._consumed[num_shared:]
                self._answers = {count: each for count, each in self._answers.items() if count <= num_shared}
            else:
                self.can_go_back, num_shared = False, 0
                self._begin_anew()
        following = token_ids[num_shared:]
        if self._take(following) if self.can_go_back else all(self._take_asked(each) for each in following):
            return True
        self._has_failed()
        return False

    def _take(self, token_ids: list[int]) -> bool:
        num_taken = self._matcher.try_consume_tokens(token_ids) if token_ids else 0
        self._consumed += token_ids[:num_taken]
        return num_taken == len(token_ids)

    def _take_asked(self, token_id: int) -> bool:
        """Behind a question about this place, which puts what is forced here into the parser."""
        self._matcher.compute_ff_tokens()
        return self._take([token_id])

    def _has_failed(self) -> bool:
        """Whether the question met a limit. It may have been about a guess: the next one begins anew."""
        if not self._matcher.is_error():
            return False
        self.error = f"the output's grammar is too complex here: {self._matcher.get_error()[:200]}"
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        self._matcher = self._beginning.deep_copy()
        self._consumed, self._answers = [], {}


def _num_shared(ours: list[int], theirs: list[int]) -> int:
    """Length of the common beginning."""
    least = min(len(ours), len(theirs))
    if ours[:least] == theirs[:least]:
        return least
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
