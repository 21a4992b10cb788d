"""vLLM #5203: a draft with another vocabulary runs, and its ids mean other words.

Kind: a draft that does not speak the model's tokens. Siblings: more tokens, fewer, as many with two swapped, a string
that differs; one that fits is taken. Refused when the engine starts, before anything is queued.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM, EngineConfig
from engine.errors import InvalidConfig
from tests.models import make_tiny_model, write_tiny_tokenizer


def engine_with(folder: Path, draft: Path) -> LLM:
    return LLM(str(folder), EngineConfig(speculative="draft", speculative_model=str(draft), num_kv_blocks=16))


@pytest.mark.parametrize("vocab_size", [312, 328, 640])
def test_another_size_is_refused_at_start(tiny_folder: Path, tmp_path: Path, vocab_size: int) -> None:
    draft = make_tiny_model(tmp_path / "draft", overrides={"vocab_size": vocab_size})
    write_tiny_tokenizer(draft, vocab_size)
    with pytest.raises(InvalidConfig, match=rf"speculative_model: .*{vocab_size}.*320"):
        engine_with(tiny_folder, draft)


@pytest.mark.parametrize(("old", "new"), [("unused3", "another"), ("A", "B")])
def test_the_same_size_with_other_strings_is_refused_at_start(
    tiny_folder: Path, tmp_path: Path, old: str, new: str
) -> None:
    draft = make_tiny_model(tmp_path / "draft")
    tokenizer = (draft / "tokenizer.json").read_text()
    changed = tokenizer.replace(f'"{old}":', '"?":').replace(f'"{new}":', f'"{old}":').replace('"?":', f'"{new}":')
    assert changed != tokenizer
    (draft / "tokenizer.json").write_text(changed)
    with pytest.raises(InvalidConfig, match=r"speculative_model: means .* the same vocabulary"):
        engine_with(tiny_folder, draft)


def test_one_that_fits_is_taken(tiny_folder: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "draft", seed=4, overrides={"num_hidden_layers": 1, "hidden_size": 32})
    llm = engine_with(tiny_folder, draft)
    llm.generate([[5, 6, 7]])
    assert llm.stats().num_drafted_tokens > 0
