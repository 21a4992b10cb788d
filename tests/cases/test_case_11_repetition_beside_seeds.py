"""vLLM #9441, #11123: greedy repetitive text beside seeded and unseeded rows changes them under speculation.

Kind: a row that speculates and its neighbours. Siblings: each proposer, rows that speculate a different number of
tokens, rows that never do, neighbours that prefill, adaptive and fixed depths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import LoadedModel
from tests.cases.trial import Trial, prompt_of

LOOP = [31, 32, 33, 34] * 8
BIAS = {31: 9.0, 32: 9.0, 33: 9.0}  # so that the tiny model goes round as a real one does
PROPOSERS = ["ngram", "suffix", "self"]


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize(
    "changes", [{"speculative_adaptive": False}, {}, {"max_num_batched_tokens": 20, "num_speculative_tokens": 8}]
)
def test_each_equals_solo(tiny: LoadedModel, tiny_folder: Path, proposer: str, changes: dict[str, Any]) -> None:
    engine = Trial(tiny, folder=tiny_folder, speculative=proposer, **changes)
    for index in range(3):
        engine.add(f"loop{index}", LOOP[: 12 + 7 * index], temperature=0.0, max_tokens=30, logit_bias=BIAS)
        engine.add(f"seeded{index}", prompt_of(9, seed=index), temperature=1.0, seed=index, max_tokens=12)
        engine.add(f"both{index}", LOOP, temperature=1.0, seed=index, max_tokens=12, logit_bias=BIAS, logprobs=1)
        engine.llm.add_request(f"unseeded{index}", prompt_of(9))  # of these only the company counts
        for _ in range(2):
            take(engine)
    while engine.llm.has_unfinished():
        take(engine)
    assert engine.llm.stats().num_drafted_tokens > 0
    engine.assert_all_as_alone()


def take(engine: Trial) -> None:
    told = engine.llm.step()
    engine.llm.check_integrity()
    engine.take([delta for delta in told if delta.request_id in engine.asked])
    for index in range(3):
        if engine.llm.stats().num_steps > 30:
            engine.llm.abort(f"unseeded{index}")


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_an_unseeded_row_is_repeated_by_the_seed_that_was_drawn_for_it(
    tiny: LoadedModel, tiny_folder: Path, proposer: str
) -> None:
    engine = Trial(tiny, folder=tiny_folder, speculative=proposer, speculative_adaptive=False)
    engine.add("loop", LOOP, temperature=0.0, max_tokens=30, logit_bias=BIAS)
    engine.add("unseeded", LOOP, temperature=1.0, seed=None, max_tokens=20, logit_bias=BIAS)
    seed = engine.llm._streams["unseeded"].request.seed
    engine.run()
    again = Trial(tiny).ask(LOOP, temperature=1.0, seed=seed, max_tokens=20, logit_bias=BIAS)
    assert engine.output("unseeded").choices[0].token_ids == again.choices[0].token_ids


@pytest.mark.real_model
@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_on_the_real_model(real: LoadedModel, proposer: str) -> None:
    engine = Trial(real, block_size=16, num_kv_blocks=200, speculative=proposer, speculative_adaptive=False)
    engine.add("loop", "one two three one two three one two three one two", temperature=0.0, max_tokens=24)
    for seed in range(2):
        engine.add(f"seeded{seed}", "A short story about a red boat:", temperature=1.0, seed=seed, max_tokens=10)
    engine.run()
    assert engine.llm.stats().num_accepted_tokens > 0
    engine.assert_all_as_alone()
