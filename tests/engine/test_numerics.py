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
    assert {name: each.config.numerics for name, each in by_numerics.items()} == {
        "auto": "invariant",
        "invariant": "invariant",
        "fast": "fast",
    }
    told = [[output.choices for output in each.generate(PROMPTS, PARAMS)] for each in by_numerics.values()]
    assert told[0] == told[1] == told[2]
    assert len({each.info.kernels for each in by_numerics.values()}) == 1  # one profile: jobs go on across them


def test_a_promise_that_cannot_be_kept_is_refused_with_the_reason(tiny_folder: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"numerics: is invariant, and \S+ on cpu promises no row") as caught:
        llm(tiny_folder, numerics="invariant", cpu_kernels="torch")
    assert caught.value.param == "numerics"
    with pytest.raises(InvalidConfig, match="numerics"):
        LLM("fake", EngineConfig(numerics="invariant"))
    assert llm(tiny_folder, cpu_kernels="torch").config.numerics == "fast"


def test_who_asks_for_speed_alone_is_guessed_for_on_any_cpu_and_has_a_profile_of_its_own(tiny_folder: Path) -> None:
    fast, plain = (llm(tiny_folder, cpu_kernels="torch", numerics=numerics) for numerics in ("fast", "auto"))
    assert (fast.config.speculative, plain.config.speculative) == ("ngram", "none")
    assert fast.info.kernels == f"{plain.info.kernels}-fast"
    assert llm(tiny_folder, cpu_kernels="torch", numerics="fast", speculative="none").config.speculative == "none"


def test_an_unknown_word_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidConfig, match=r"numerics: is 'exact'; choose one of auto, invariant, fast"):
        EngineConfig(numerics="exact")  # type: ignore[arg-type]
