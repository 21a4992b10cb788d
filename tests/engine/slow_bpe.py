"""Byte-level BPE written out plainly, to check the fast tokenizer against something that shares no code with it.

Text is cut by the rule that GGUF calls `smollm`: every digit by itself, then GPT-2's words within what is between.
Inside a word the pair with the earliest merge is joined until none is left.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import regex

from engine.text.vocabulary import printable_bytes

_DIGITS = regex.compile(r"\p{N}")
_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class SlowBpe:
    def __init__(self, folder: Path) -> None:
        description = json.loads((folder / "tokenizer.json").read_text())
        self._ids: dict[str, int] = description["model"]["vocab"]
        self._ranks = {tuple(pair): rank for rank, pair in enumerate(description["model"]["merges"])}
        self._specials = {token["content"]: token["id"] for token in description["added_tokens"]}
        self._drawn = {byte: character for character, byte in printable_bytes().items()}
        self._split = regex.compile("(" + "|".join(map(regex.escape, self._specials)) + ")")

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        for part in self._split.split(text):
            if part in self._specials:
                found.append(self._specials[part])
                continue
            for word in self._words(part):
                found += self._merged("".join(self._drawn[byte] for byte in word.encode()))
        return found

    @staticmethod
    def _words(text: str) -> list[str]:
        pieces, place = [], 0
        for digit in _DIGITS.finditer(text):
            pieces += [text[place : digit.start()], digit[0]]
            place = digit.end()
        pieces.append(text[place:])
        return [word for piece in pieces for word in _WORDS.findall(piece)]

    def _merged(self, word: str) -> list[int]:
        parts = [character for character in word if character in self._ids]  # the vocabulary lacks a few bytes
        while True:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairwise(parts)]
            if not ranks or min(ranks) == len(self._ranks):
                return [self._ids[part] for part in parts]
            place = ranks.index(min(ranks))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
