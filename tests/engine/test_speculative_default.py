"""What guesses where nothing was said: only a model whose bits cannot change by it is guessed for."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.errors import InvalidConfig
from tests.conftest import need_native_path

LOOP = [11, 12, 13, 14, 15] * 6
BIASED = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logit_bias=dict.fromkeys((11, 12, 13), 12.0))


def test_the_native_path_guesses_and_says_the_same_tokens(tiny_folder: Path) -> None:
    need_native_path()
    asked = [{"prompt_token_ids": LOOP}]
    guessing, plain = (
        LLM(str(tiny_folder), EngineConfig(cpu_kernels="native", num_kv_blocks=64, **more))
        for more in ({}, {"speculative": "none"})
    )
    assert guessing.config.speculative == "ngram"
    assert guessing.generate(asked, BIASED)[0].choices == plain.generate(asked, BIASED)[0].choices
    assert guessing.stats().num_accepted_tokens > 0
    assert plain.stats().num_drafted_tokens == 0


@pytest.mark.parametrize("kernels", ["torch", "fake"])
def test_nothing_else_guesses_unasked(tiny_folder: Path, kernels: str) -> None:
    model, settings = ("fake", {}) if kernels == "fake" else (str(tiny_folder), {"cpu_kernels": "torch"})
    llm = LLM(model, EngineConfig(num_kv_blocks=64, **settings))
    assert llm.config.speculative == "none"
    llm.generate([{"prompt_token_ids": LOOP}], BIASED)
    assert llm.stats().num_drafted_tokens == 0


def test_what_is_asked_for_stays(tiny_folder: Path) -> None:
    for proposer in ("none", "ngram", "suffix"):
        llm = LLM(str(tiny_folder), EngineConfig(num_kv_blocks=64, speculative=proposer))  # type: ignore[arg-type]
        assert llm.config.speculative == proposer


def test_an_unknown_proposer_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidConfig, match=r"speculative: is 'guess'; choose one of auto, none, ngram, suffix"):
        EngineConfig(speculative="guess")  # type: ignore[arg-type]
