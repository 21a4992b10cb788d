"""Workloads: `[{"prompt_ids": [...], "max_tokens": n}]`, from a file or made of the bench's own corpus."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

CORPUS = Path(__file__).parent / "corpus"


class Item(TypedDict):
    prompt_ids: list[int]
    max_tokens: int


def load(name: str, tokenizer: Tokenizer) -> list[Item]:
    """`bulk32` (32 pieces of real documents, as bulk summarization sends them), or a JSON file's path."""
    if name == "bulk32":
        return bulk32(tokenizer)
    items: list[Item] = json.loads(Path(name).read_text())
    return items


def bulk32(tokenizer: Tokenizer) -> list[Item]:
    """32 pieces of 60 to 700 tokens of the corpus, each with 20 to 64 tokens to write; about 10,000 and 1,350."""
    rng = random.Random(32)
    documents = [
        tokenizer.encode(path.read_text())
        for path in sorted(CORPUS.iterdir())
        if path.suffix in (".txt", ".md") and path.name != "README.md" and path.stat().st_size > 2000
    ]
    items: list[Item] = []
    for index in range(32):
        document = documents[index % len(documents)]
        length = rng.randint(60, min(560, len(document)))
        start = rng.randint(0, len(document) - length)
        items.append({"prompt_ids": document[start : start + length], "max_tokens": rng.randint(20, 64)})
    return items
