"""Workloads: `[{"prompt_ids": [...], "max_tokens": n}]`, from a file or made of the bench's own corpus."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

CORPUS = Path(__file__).parent / "corpus"

# (prompt tokens, output tokens) of 32 excerpts of real package documentation, as bulk summarization met them: 9,975 and
# 1,342 together. How long a run takes depends on these lengths and not on the words.
W32_LENGTHS = [
    *[(363, 81), (142, 53), (768, 37), (305, 49), (325, 32), (523, 28), (178, 20), (57, 16)],
    *[(184, 46), (515, 107), (219, 46), (768, 41), (360, 58), (764, 32), (232, 25), (250, 35)],
    *[(381, 57), (309, 73), (89, 24), (408, 19), (119, 23), (212, 26), (241, 18), (168, 128)],
    *[(582, 57), (144, 48), (106, 39), (190, 28), (188, 22), (161, 8), (325, 19), (399, 47)],
]


class Item(TypedDict):
    prompt_ids: list[int]
    max_tokens: int


def load(name: str, tokenizer: Tokenizer) -> list[Item]:
    """`w32` (the lengths of W32), `bulk32` (32 pieces, as bulk summarization sends them), or a JSON file's path."""
    if name == "w32":
        return pieces(tokenizer, random.Random(0), W32_LENGTHS)
    if name == "bulk32":
        return bulk32(tokenizer)
    items: list[Item] = json.loads(Path(name).read_text())
    return items


def bulk32(tokenizer: Tokenizer) -> list[Item]:
    """32 pieces of 60 to 560 tokens of the corpus, each with 20 to 64 tokens to write; about 10,000 and 1,350."""
    rng = random.Random(32)
    documents = long_documents(tokenizer)
    items: list[Item] = []
    for index in range(32):
        document = documents[index % len(documents)]
        length = rng.randint(60, min(560, len(document)))
        start = rng.randint(0, len(document) - length)
        items.append({"prompt_ids": document[start : start + length], "max_tokens": rng.randint(20, 64)})
    return items


def long_documents(tokenizer: Tokenizer) -> list[list[int]]:
    """The corpus without its short texts, as token ids, in the order of the files' names."""
    return [
        tokenizer.encode(path.read_text())
        for path in sorted(CORPUS.iterdir())
        if path.suffix in (".txt", ".md") and path.name != "README.md" and path.stat().st_size > 2000
    ]


def pieces(tokenizer: Tokenizer, rng: random.Random, lengths: list[tuple[int, int]]) -> list[Item]:
    """One excerpt for each (prompt tokens, output tokens), from the documents that are long enough, in turn."""
    documents = long_documents(tokenizer)
    items: list[Item] = []
    for index, (num_prompt, num_output) in enumerate(lengths):
        enough = [document for document in documents if len(document) >= num_prompt]
        document = enough[index % len(enough)]
        start = rng.randint(0, len(document) - num_prompt)
        items.append({"prompt_ids": document[start : start + num_prompt], "max_tokens": num_output})
    return items
