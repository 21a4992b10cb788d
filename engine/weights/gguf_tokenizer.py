"""Builds tokenizer.json from the vocabulary and merges inside a GGUF file (byte-level BPE).

GGUF names how text is cut before BPE by a word (`tokenizer.ggml.pre`); the table below gives each word's rule.
Another word, or another kind of vocabulary, is refused: a near miss would tokenize almost right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from engine.errors import ModelLoadError

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that are matched before BPE; only the first is hidden in text
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


class Fields(Protocol):
    def require(self, key: str) -> Any: ...
    def get(self, key: str, default: Any = None) -> Any: ...


def tokenizer_json(source: Fields) -> str:
    """tokenizer.json as text. Raises ModelLoadError for a vocabulary this cannot rebuild exactly."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    model = source.require("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelLoadError(f"GGUF tokenizer model {model!r} is not supported (gpt2 is); use the safetensors folder")
    tokens: list[str] = source.require("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in source.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(source.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = source.require("tokenizer.ggml.token_type")
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    if adds_bos(source):
        bos_id = source.require("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )
    return str(tokenizer.to_str())


def adds_bos(source: Fields) -> bool:
    """Whether text begins with BOS: as the file says, else as llama.cpp takes it, for Llama 3 alone."""
    return bool(source.get("tokenizer.ggml.add_bos_token", source.get("tokenizer.ggml.pre") == "llama-bpe"))


def _pre_tokenizer(word: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    def by_words(pattern: str) -> Any:
        return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])

    rules: dict[str, Callable[[], Any]] = {
        "default": lambda: ByteLevel(add_prefix_space=False),
        "gpt-2": lambda: ByteLevel(add_prefix_space=False),
        "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
        "llama-bpe": lambda: by_words(_LLAMA3_WORDS),
        "qwen2": lambda: by_words(_QWEN2_WORDS),
    }
    if word not in rules:
        raise ModelLoadError(f"GGUF pre-tokenizer {word!r} is not supported; known: {', '.join(rules)}")
    return rules[word]()
