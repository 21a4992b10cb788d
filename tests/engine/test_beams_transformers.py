"""Beams of tiny random models are those of transformers' own `generate`: sequences, and scores within 1e-4."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.config import LoadedModel
from tests import beam_reference
from tests.engine.runner_aids import load
from tests.models import EOS_TOKEN_ID, FAMILIES, make_tiny_model

pytest.importorskip("transformers")

STOPS = [EOS_TOKEN_ID, *range(40, 80)]  # so that some hypotheses of a random model end early
PROMPTS = [random.Random(length).choices(range(3, 270), k=length) for length in (4, 7, 30)]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    """(ours, theirs) of one family: full attention, sliding windows, both in turns."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("beams") / request.param, request.param)
    return load(folder, cpu_kernels="torch"), beam_reference.theirs(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    folder = make_tiny_model(tmp_path_factory.mktemp("beams") / "one")
    return load(folder, cpu_kernels="torch"), beam_reference.theirs(folder)


def ours(loaded: LoadedModel, prompts: list[list[int]], **params: Any) -> list[Any]:
    """All prompts at once, in one engine."""
    llm = LLM(loaded, EngineConfig(num_kv_blocks=64, max_num_seqs=16, max_num_batched_tokens=20))
    outputs = llm.generate(prompts, SamplingParams(use_beam_search=True, **params))
    llm.check_integrity()
    return outputs


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_every_family(family: tuple[LoadedModel, Any], early_stopping: bool | Literal["never"]) -> None:
    loaded, theirs = family
    outputs = ours(loaded, PROMPTS, n=4, max_tokens=16, early_stopping=early_stopping, stop_token_ids=STOPS[1:])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = beam_reference.generated(
            theirs, prompt, 4, STOPS, max_new_tokens=16, early_stopping=early_stopping, length_penalty=1.0
        )
        beam_reference.assert_same(output.choices, expected)


@pytest.mark.parametrize("width", [2, 3, 8])
@pytest.mark.parametrize("length_penalty", [2.0, 0.0, -0.5])
@pytest.mark.parametrize("max_tokens", [1, 24])
def test_widths_and_penalties(
    llama: tuple[LoadedModel, Any], width: int, length_penalty: float, max_tokens: int
) -> None:
    loaded, theirs = llama
    outputs = ours(
        loaded, PROMPTS[:2], n=width, max_tokens=max_tokens, length_penalty=length_penalty, stop_token_ids=STOPS[1:]
    )
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        expected = beam_reference.generated(
            theirs, prompt, width, STOPS, max_new_tokens=max_tokens, length_penalty=length_penalty
        )
        beam_reference.assert_same(output.choices, expected)


@pytest.mark.parametrize(
    ("mine", "its"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
        ({"min_tokens": 9}, {"min_new_tokens": 9}),
        ({"logit_bias": {17: 3.0, 44: -2.0, 90: 1.5}}, {"sequence_bias": [[[17], 3.0], [[44], -2.0], [[90], 1.5]]}),
    ],
)  # fmt: skip
def test_processors_act_on_log_softmax(
    llama: tuple[LoadedModel, Any], mine: dict[str, Any], its: dict[str, Any]
) -> None:
    loaded, theirs = llama
    outputs = ours(loaded, PROMPTS, n=4, max_tokens=16, stop_token_ids=STOPS[1:], **mine)
    plain = ours(loaded, PROMPTS, n=4, max_tokens=16, stop_token_ids=STOPS[1:])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = beam_reference.generated(theirs, prompt, 4, STOPS, max_new_tokens=16, **its)
        beam_reference.assert_same(output.choices, expected)
    assert [output.choices for output in outputs] != [output.choices for output in plain]


def test_bad_words_are_never_written(llama: tuple[LoadedModel, Any]) -> None:
    loaded, _ = llama
    (plain,) = ours(loaded, PROMPTS[1:2], n=4, max_tokens=10)
    written = {token_id for choice in plain.choices for token_id in choice.token_ids}
    words = {token_id: loaded.tokenizer.decode([token_id]) for token_id in sorted(written)}
    bad = {token_id: word for token_id, word in words.items() if loaded.tokenizer.encode(word.strip()) == [token_id]}
    assert bad
    (output,) = ours(loaded, PROMPTS[1:2], n=4, max_tokens=10, bad_words=list(bad.values()))
    assert not {token_id for choice in output.choices for token_id in choice.token_ids} & bad.keys()
    assert [choice.finish_reason for choice in output.choices] == ["length"] * 4


def test_logprobs_and_sums_are_of_the_raw_distribution(llama: tuple[LoadedModel, Any]) -> None:
    loaded, theirs = llama
    (plain,) = ours(loaded, PROMPTS[2:], n=3, max_tokens=12)
    biases = dict.fromkeys(plain.choices[0].token_ids, 0.5)
    (output,) = ours(loaded, PROMPTS[2:], n=3, max_tokens=12, logprobs=3, logit_bias=biases)
    for choice in output.choices:
        with torch.no_grad():
            logits = theirs(torch.tensor([PROMPTS[2] + choice.token_ids])).logits[0, len(PROMPTS[2]) - 1 : -1]
        raw = logits.log_softmax(-1)
        for position, token_id, row in zip(choice.logprobs, choice.token_ids, raw, strict=True):
            assert position.chosen.token_id == token_id
            assert position.chosen.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert [each.token_id for each in position.top] == row.topk(3).indices.tolist()
        assert choice.cumulative_logprob == pytest.approx(sum(each.chosen.logprob for each in choice.logprobs))
        assert choice.score != pytest.approx(choice.cumulative_logprob / len(choice.token_ids))


@pytest.mark.real_model
@pytest.mark.parametrize("early_stopping", ["never", pytest.param(False, marks=pytest.mark.long)])
def test_the_real_model(real_folder: Path, early_stopping: bool | Literal["never"]) -> None:
    loaded, theirs = load(real_folder, num_kv_blocks=256), beam_reference.theirs(real_folder)
    prompts = [loaded.tokenizer.encode(text) for text in ("The capital of France is", "Once upon a time, in")]
    stops = [*loaded.info.eos_token_ids, *loaded.tokenizer.encode(".\n,")]
    outputs = ours(loaded, prompts, n=4, max_tokens=20, stop_token_ids=stops[1:], early_stopping=early_stopping)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = beam_reference.generated(
            theirs, prompt, 4, stops, max_new_tokens=20, early_stopping=early_stopping, length_penalty=1.0
        )
        beam_reference.assert_same(output.choices, expected)
