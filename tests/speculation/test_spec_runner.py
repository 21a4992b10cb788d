"""Speculation on the real runner: several places of a row in one forward are the row decoded one by one, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.batch import build_batch
from engine.config import LoadedModel
from engine.kv_storage import KVStorage
from engine.plan import Row
from engine.runner import TorchRunner
from tests.cases.trial import Trial, prompt_of
from tests.engine.runner_aids import new_sequence

ALWAYS: dict[str, Any] = {"speculative_adaptive": False}
REPETITIVE = [11, 12, 13, 14, 15] * 6
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.9, "seed": 6, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "seed": 7, "presence_penalty": 0.6, "frequency_penalty": 0.4,
                  "repetition_penalty": 1.2},
    "min_tokens": {"temperature": 0.8, "seed": 8, "min_tokens": 9, "logit_bias": {2: 30.0}, "ignore_eos": False},
    "bad_words": {"temperature": 0.0, "bad_words": ["the", "ing"], "logit_bias": {20: 4.0, 21: 4.5}},
    "n4": {"temperature": 1.0, "seed": 9, "n": 4},
}  # fmt: skip
# Under a strong bias the tiny model says few tokens over and over, so that proposals are accepted.
BIAS = dict.fromkeys((11, 12, 13), 12.0)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_places", [2, 5, 9])
def test_many_places_of_a_row_at_once_are_the_row_decoded_one_by_one(
    any_tiny: LoadedModel, num_rows: int, num_places: int
) -> None:
    """Logits and KV, bitwise, at every offset into a block, whatever stands in the slots before."""
    runner = any_tiny.runner
    assert isinstance(runner, TorchRunner)
    decoder = runner.decoder
    prompts = [prompt_of(20 + 9 * index, seed=index) for index in range(num_rows)]
    tokens = [prompt_of(num_places, seed=10 + index) for index in range(num_rows)]
    tables = [list(range(8 * index, 8 * index + 8)) for index in range(num_rows)]

    def forward(kv: KVStorage, starts: list[int], parts: list[list[int]], num_logits: int) -> torch.Tensor:
        rows = [
            Row(new_sequence(prompt), start, part, table, num_logits)
            for prompt, start, part, table in zip(prompts, starts, parts, tables, strict=True)
        ]
        return decoder.forward(build_batch(rows, 8, decoder.device), kv).clone()

    def fresh() -> KVStorage:
        kv = KVStorage(decoder.config, 8, 8 * num_rows, 0, torch.float32, decoder.device)
        for layer in range(decoder.config.num_layers):
            for pool in kv.layer(layer):
                pool.fill_(float("nan"))
        forward(kv, [0] * num_rows, prompts, 1)
        return kv

    starts = [len(prompt) for prompt in prompts]
    one_by_one, at_once = fresh(), fresh()
    each = [
        forward(one_by_one, [start + place for start in starts], [part[place : place + 1] for part in tokens], 1)
        for place in range(num_places)
    ]
    forward(at_once, starts, [part[::-1] for part in tokens], num_places)  # rejected: their slots are written again
    together = forward(at_once, starts, tokens, num_places)
    assert torch.equal(together.view(num_rows, num_places, -1), torch.stack(each, dim=1))
    for layer in range(decoder.config.num_layers):
        for ours, theirs in zip(at_once.layer(layer), one_by_one.layer(layer), strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("speculative", ["ngram", "suffix"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_request_equals_itself_without_speculation(tiny: LoadedModel, speculative: str, kind: str) -> None:
    engine = Trial(tiny, speculative=speculative, num_speculative_tokens=4, **ALWAYS)
    for index in range(3):
        params = {"max_tokens": 24, "logprobs": 2, **KINDS[kind]}
        params["logit_bias"] = {**BIAS, **params.get("logit_bias", {})}
        engine.add(str(index), REPETITIVE[: 20 + index], **params)
        engine.add(f"plain{index}", prompt_of(9, seed=index), **{**params, "logit_bias": {}, "max_tokens": 12})
    engine.run()
    stats = engine.llm.stats()
    assert stats.num_drafted_tokens > stats.num_accepted_tokens > 0, "nothing was accepted, or nothing rejected"
    engine.assert_all_as_alone()


@pytest.mark.parametrize("speculative", ["ngram", "suffix"])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_blocks": 16, "num_host_slots": 9, "preemption_mode": "swap"},
        {"num_kv_blocks": 16, "preemption_mode": "recompute"},
        {"max_num_batched_tokens": 11, "max_num_seqs": 9},
        {"block_size": 16},
        {"speculative_adaptive": True},
    ],
)
def test_any_company_and_any_pool(any_tiny: LoadedModel, speculative: str, changes: dict[str, Any]) -> None:
    engine = Trial(any_tiny, **{"speculative": speculative, "num_speculative_tokens": 6, **ALWAYS, **changes})
    for turn in range(2):  # the second time with a warm cache
        for index, kind in enumerate(KINDS):
            params = {"max_tokens": 20, **KINDS[kind]}
            params["logit_bias"] = {**BIAS, **params.get("logit_bias", {})}
            engine.add(f"{kind}{turn}", REPETITIVE[: 12 + 2 * index], **params)
        engine.run()
    assert engine.llm.stats().num_drafted_tokens > 0
    engine.assert_all_as_alone()


@pytest.mark.parametrize("speculative", ["ngram", "suffix"])
def test_a_continuation_goes_on_as_it_would_have(tiny: LoadedModel, speculative: str) -> None:
    params = {"max_tokens": 30, "temperature": 1.0, "seed": 3, "logit_bias": BIAS, "presence_penalty": 0.5}
    whole = Trial(tiny).ask(REPETITIVE, **params).choices[0].token_ids
    for num_emitted in (1, 7, 15, 29):
        engine = Trial(tiny, speculative=speculative, **ALWAYS)
        rest = engine.ask(REPETITIVE, emitted=[whole[:num_emitted]], **params).choices[0].token_ids
        assert whole[:num_emitted] + rest == whole


@pytest.mark.real_model
@pytest.mark.parametrize("speculative", ["ngram", "suffix"])
def test_on_the_real_model(real: LoadedModel, speculative: str) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 3 + "The quick"
    engine = Trial(real, block_size=16, num_kv_blocks=128, speculative=speculative, **ALWAYS)
    for index, kind in enumerate(KINDS):
        engine.add(kind, text + " brown"[: 6 * (index % 2)], **{"max_tokens": 24, **KINDS[kind]})
    engine.run()
    assert engine.llm.stats().num_accepted_tokens > 10
    engine.assert_all_as_alone()
