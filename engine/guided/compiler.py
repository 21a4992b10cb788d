"""Grammars compiled for one model's vocabulary, each once while it is in use."""

from __future__ import annotations

import re
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from engine.guided.matcher import GrammarMatcher
    from engine.params import Guided
    from engine.text.tokenizer import Tokenizer

_MAX_COMPILED = 64
# Of a grammar's own text. llguidance takes back no tokens of what has limits or stops of its own; and where it is told
# not to force text, a question about what is forced does so all the same. In a string such a word costs the guesses.
_COUNTS = re.compile(r"max_tokens|stop|suffix|lazy|no_forcing")


class GrammarCompiler:
    """Thread-safe: whoever compiles ahead of `LLM.add_request` spares the engine's thread the wait.

    The first grammar loads the library and gives it the vocabulary: about half a second for 49,152 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: of the model, which may have fewer rows than its tokenizer knows tokens."""
        self._tokenizer = tokenizer
        self._num_tokens = min(tokenizer.vocab_size, vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # by grammar; the least recently used goes first
        self._lock = Lock()

    def compile(self, guided: Guided) -> GrammarMatcher:
        """A matcher at the grammar's beginning. Raises InvalidRequest, field `guided`, for what cannot be compiled."""
        from engine.guided.grammar import check, grammar_of
        from engine.guided.matcher import GrammarMatcher

        grammar = grammar_of(guided)
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                check(guided)  # names the place, which compiling does not
                compiled = self._compiled[grammar] = self._compile(grammar)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            assert self._vocabulary is not None
            can_go_back = guided.grammar is None or not _COUNTS.search(guided.grammar)
            return GrammarMatcher(compiled, self._vocabulary, self._num_tokens, can_go_back=can_go_back)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        from engine.guided.grammar import LIMITS

        if self._vocabulary is None:
            self._vocabulary = _vocabulary_of(self._tokenizer)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest("guided", f"cannot be compiled: {matcher.get_error()[:500]}; simplify it")
        return matcher


class _Described:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _vocabulary_of(tokenizer: Tokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.eos_token_ids:
        raise InvalidRequest(
            "guided", "needs a model with an end-of-sequence token, which this one lacks; leave it out"
        )
    return LLTokenizer(TokenizerWrapper(_Described(tokenizer)), eos_token=sorted(tokenizer.eos_token_ids))
