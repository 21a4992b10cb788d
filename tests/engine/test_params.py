"""Sampling parameters: every bad value is refused by its field's name, and the normal form is what vLLM means."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import InvalidConfig, InvalidRequest
from engine.params import SamplingParams

FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
FLOATS += ["length_penalty", "deadline"]
INTS = ["n", "best_of", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "priority"]


def refused(field: str, value: Any, **others: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping({field: value, **others}).validated(vocab_size=1000)
    assert caught.value.param.split("[")[0] == field
    assert caught.value.message and ";" in caught.value.message, "a message says what is wrong and what to do"
    return caught.value


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "1.0", True, None, [1.0]])
def test_no_float_takes_what_is_no_finite_number(field: str, value: Any) -> None:
    if value is None and field == "deadline":
        return
    refused(field, value)


@pytest.mark.parametrize("field", INTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, "1", True, 1.5, [1]])
def test_no_whole_number_takes_anything_else(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", -1e-30), ("temperature", 101),
        ("top_p", 0), ("top_p", -1), ("top_p", 1.01),
        ("top_k", -2), ("min_p", -0.1), ("min_p", 1.1),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 1e-30),
        ("repetition_penalty", 101),
        ("n", 0), ("n", -1), ("n", 129), ("n", 10**30),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**12), ("min_tokens", -1),
        ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", -1), ("prompt_logprobs", 21),
        ("seed", 2**64), ("seed", -(2**63) - 1), ("priority", 2**40),
        ("stop", ""), ("stop", [""]), ("stop", ["a", ""]), ("stop", ["x" * 1025]), ("stop", ["é" * 513]),
        ("stop", ["x"] * 65), ("stop", ["a"] * 5000), ("stop", ["x" * 1_000_000]), ("stop", [3]), ("stop", ["\ud83d"]),
        ("stop_token_ids", [-1]), ("stop_token_ids", [1000]), ("stop_token_ids", list(range(65))),
        ("stop_token_ids", "1"),
        ("bad_words", [""]), ("bad_words", ["x" * 1025]), ("bad_words", ["x"] * 65),
        ("logit_bias", {-1: 1}), ("logit_bias", {1000: 1}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: 101}),
        ("logit_bias", {1: -math.inf}), ("logit_bias", dict.fromkeys(range(1025), 0)),
        ("length_penalty", 2.0), ("early_stopping", True), ("guided", {"regex": ""}), ("early_stopping", "sometimes"),
        ("deadline", 0), ("deadline", -1),
        ("colour", "red"), ("Temperature", 1),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    refused(field, value)


def test_combinations_are_checked() -> None:
    refused("min_tokens", 5, max_tokens=4)
    refused("best_of", 1, n=2)
    refused("best_of", 2, n=1, temperature=0.0)
    for name, value in (
        ("temperature", 0.0), ("temperature", 0.7), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1),
        ("guided", {"choice": ["a"]}), ("length_penalty", 101.0), ("best_of", 2),
    ):  # fmt: skip
        refused(name, value, n=3, use_beam_search=True)


def test_beams_take_their_own_fields() -> None:
    params = SamplingParams(
        n=2, use_beam_search=True, length_penalty=-1.5, early_stopping="never", stop=["x"], stop_token_ids=[3],
        min_tokens=2, max_tokens=9, logprobs=2, seed=5, best_of=4, logit_bias={1: -100}, repetition_penalty=1.2,
    )  # fmt: skip
    assert params.validated(vocab_size=10).num_sequences == 4 and params.is_held_back
    assert SamplingParams(n=2, best_of=3).validated().is_held_back
    assert not SamplingParams(n=2, best_of=2).validated().is_held_back


def test_more_logprobs_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="logprobs: is 20 and the vocabulary has 10"):
        SamplingParams(logprobs=20).validated(vocab_size=10)
    assert SamplingParams(logprobs=10).validated(vocab_size=10).logprobs == 10


@pytest.mark.parametrize("top_k", [-1, 0, 1000, 1001, 2**31, 2**63 - 1])
def test_a_top_k_over_the_vocabulary_filters_nothing(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).validated(vocab_size=1000).top_k == 0


def test_a_top_k_within_the_vocabulary_stays() -> None:
    assert SamplingParams(top_k=999).validated(vocab_size=1000).top_k == 999


@pytest.mark.parametrize("temperature", [0, -0.0, 1e-30, 9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature).validated()
    assert params.temperature == 0.0 and math.copysign(1, params.temperature) == 1 and params.is_greedy


def test_edges_are_allowed() -> None:
    params = SamplingParams(
        temperature=100, top_p=1e-30, min_p=1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01,
        n=128, logprobs=20, stop=["x" * 1024] * 64, seed=2**64 - 1, logit_bias={0: -100, 999: 100},
    )  # fmt: skip
    assert params.validated(vocab_size=1000).n == 128


@pytest.mark.parametrize("max_tokens", [1, 64, None])
@pytest.mark.parametrize(("num_prompt", "room"), [(98, 2), (99, 1)])
def test_generation_ends_at_the_context(max_tokens: int | None, num_prompt: int, room: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=1)
    params = params.validated(max_model_len=100, num_prompt_tokens=num_prompt)
    assert params.max_tokens == min(room, max_tokens or room)
    assert params.min_tokens <= params.max_tokens


@pytest.mark.parametrize("num_prompt", [100, 101, 10**6])
def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(num_prompt: int) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt: has {num_prompt} tokens and the context holds 100"):
        SamplingParams().validated(max_model_len=100, num_prompt_tokens=num_prompt)


def test_normal_form_is_checked_again_without_a_change() -> None:
    """The gateway checks, then the engine does."""
    limits = {"vocab_size": 1000, "max_model_len": 100, "num_prompt_tokens": 60}
    params = SamplingParams(top_k=-1, temperature=1e-9, max_tokens=90, min_tokens=80, seed=-5, n=3, best_of=3)
    once = params.validated(**limits)
    assert (
        once.validated(**limits) == once == SamplingParams.from_mapping(msgspec.to_builtins(once)).validated(**limits)
    )


def test_the_wire_brings_biases_with_text_keys() -> None:
    mapping = json.loads('{"logit_bias": {"7": 2}, "n": 2}')
    assert SamplingParams.from_mapping(mapping).logit_bias == {7: 2.0}
    with pytest.raises(InvalidRequest):
        SamplingParams.from_mapping({"logit_bias": {"seven": 1}})


def test_what_is_valid_survives_the_wire() -> None:
    params = SamplingParams(top_k=2**63 - 1, seed=2**64 - 1, stop=["é"], logit_bias={3: 1.5}).validated()
    again = SamplingParams.from_mapping(msgspec.msgpack.decode(msgspec.msgpack.encode(params), strict=True))
    assert again == params


def test_values_set_in_python_are_checked_like_those_from_the_wire() -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        SamplingParams(stop="abc").validated()  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="temperature"):
        SamplingParams(temperature="1").validated()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 12), ("block_size", 0), ("num_kv_blocks", 0), ("max_num_seqs", 0), ("dtype", "int3"),
        ("swap_space", -1), ("swap_space", math.nan), ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.1),
        ("max_step_seconds", 0), ("scheduling_policy", "lifo"), ("preemption_mode", "none"), ("speculative", "guess"),
        ("max_num_batched_tokens", 10), ("enable_host_prefix_cache", True), ("fake_poison", ""),
        ("priority_seconds", 0), ("speculative_model", "x"), ("speculative_verification", "none"),
        ("fake_acceptance", 1.5), ("fake_eos_every", -1),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig(**{field: value})
    assert caught.value.param == field


def test_checking_parameters_and_faking_a_model_load_no_torch() -> None:
    code = (
        "import sys; from engine import LLM, SamplingParams; LLM('fake').generate('a', SamplingParams(max_tokens=2));"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
