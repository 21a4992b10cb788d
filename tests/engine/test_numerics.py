"""What a model promises of its rows, what was asked for, and what becomes of a promise that cannot be kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.errors import InvalidConfig
from tests.conftest import need_native_path

PROMPTS = [{"prompt_token_ids": [11, 12, 13, 14, 15] * 6}, {"prompt_token_ids": [31, 7, 9]}]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, logprobs=2)


def llm(folder: Path, **changes: object) -> LLM:
    return LLM(str(folder), EngineConfig(num_kv_blocks=64, **changes))  # type: ignore[arg-type]


def test_the_native_path_promises_invariance_and_is_as_fast_as_it_can_be(tiny_folder: Path) -> None:
    need_native_path()
    by_numerics = {numerics: llm(tiny_folder, numerics=numerics) for numerics in ("auto", "invariant", "fast")}
    assert all(each.info.is_invariant and each.config.speculative == "ngram" for each in by_numerics.values())
    told = [[output.choices for output in each.generate(PROMPTS, PARAMS)] for each in by_numerics.values()]
    assert told[0] == told[1] == told[2]
    assert len({each.info.kernels for each in by_numerics.values()}) == 1  # one profile: jobs go on across them


def test_a_promise_that_cannot_be_kept_is_refused_with_the_reason(tiny_folder: Path) -> None:
    for changes, instead in (
        ({"cpu_kernels": "torch"}, "native"),
        ({"device": "cuda"}, "cpu"),
        ({"speculative_verification": "rejection", "speculative": "ngram"}, "coupled"),
        ({"tensor_parallel_size": 2}, "auto or fast"),
    ):
        with pytest.raises(InvalidConfig, match=f"numerics: is invariant, .* use {instead}") as caught:
            EngineConfig(numerics="invariant", **changes)  # type: ignore[arg-type]
        assert caught.value.param == "numerics"


def test_what_only_the_loaded_model_knows_is_refused_then(tiny_folder: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"numerics: is invariant, and \S+ on \S+ promises no row"):
        LLM("fake", EngineConfig(numerics="invariant"))


def test_who_asks_for_speed_alone_is_guessed_for_on_any_cpu(tiny_folder: Path) -> None:
    fast, plain = (llm(tiny_folder, cpu_kernels="torch", numerics=numerics) for numerics in ("fast", "auto"))
    assert (fast.config.speculative, plain.config.speculative) == ("ngram", "none")
    assert not fast.info.is_invariant
    assert llm(tiny_folder, cpu_kernels="torch", numerics="fast", speculative="none").config.speculative == "none"


def test_an_unknown_word_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidConfig, match=r"numerics: is 'exact'; choose one of auto, invariant, fast"):
        EngineConfig(numerics="exact")  # type: ignore[arg-type]
