"""vLLM #41758, #22987; transformers #30042: penalties, min_tokens and logit_bias count proposals wrongly.

Kind: whatever looks at the output so far, at a place behind proposals. Siblings: each alone and all together, bad words
that begin in one proposal and end in the next, stop tokens barred until min_tokens inside proposals; greedy, sampled.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.config import LoadedModel
from tests.cases.trial import Trial

LOOP = [51, 52, 53, 54] * 6
PENALTIES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.4},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
]
LEAST: list[dict[str, Any]] = [{}, {"min_tokens": 7}, {"min_tokens": 14}]
BIASES = [
    {51: 8.0, 52: 8.0, 53: 8.0},
    {51: 8.0, 52: 8.0, 53: 8.0, 2: 7.5},  # 2: end of sequence, as likely as going on
]


@pytest.mark.parametrize("proposer", ["ngram", "suffix", "self"])
def test_penalty_by_min_tokens_by_logit_bias(tiny: LoadedModel, tiny_folder: Path, proposer: str) -> None:
    """All combinations in one engine, greedy and sampled; the same ids as without speculation."""
    engine = Trial(tiny, folder=tiny_folder, speculative=proposer, speculative_adaptive=False, num_kv_blocks=400,
                   max_num_seqs=60, num_speculative_tokens=4)  # fmt: skip
    for index, (penalty, least, bias) in enumerate(product(PENALTIES, LEAST, BIASES)):
        params = {"max_tokens": 20, "ignore_eos": False, "logit_bias": bias, **penalty, **least}
        for temperature in (0.0, 1.0):
            engine.add(f"{index}/{temperature}", LOOP[: 12 + index % 5], temperature=temperature, **params)
    engine.run()
    stats = engine.llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    ends = [output.choices[0].finish_reason for output in map(engine.output, engine.asked)]
    assert ends.count("stop") > 5 and ends.count("length") > 5
    engine.assert_all_as_alone()


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_bad_words_across_proposals(tiny: LoadedModel, proposer: str) -> None:
    """A forbidden word of several tokens, whose beginning is itself a proposal."""
    tokenizer = tiny.tokenizer
    words = [tokenizer.decode([token_id]) for token_id in (71, 72, 73)]
    bias = {71: 9.0, 72: 9.0, 73: 9.0}
    engine = Trial(tiny, speculative=proposer, speculative_adaptive=False)
    for index, bad in enumerate(([words[0] + words[1]], [words[1] + words[2] + words[0]], [words[2] + words[2]])):
        for temperature in (0.0, 1.0):
            engine.add(f"{index}/{temperature}", [71, 72, 73] * 6, temperature=temperature, max_tokens=24,
                       logit_bias=bias, bad_words=bad)  # fmt: skip
    engine.run()
    assert engine.llm.stats().num_accepted_tokens > 0
    engine.assert_all_as_alone()


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_stop_tokens_and_strings_with_a_least_length(tiny: LoadedModel, proposer: str) -> None:
    bias = {71: 9.0, 72: 9.0, 73: 9.0}
    text = tiny.tokenizer.decode([72])
    engine = Trial(tiny, speculative=proposer, speculative_adaptive=False)
    for least in (0, 1, 5, 9, 20):
        for index, stops in enumerate(
            ({"stop_token_ids": [72]}, {"stop": [text]}, {"stop": [text], "stop_token_ids": [73]})
        ):
            engine.add(f"{least}/{index}", [71, 72, 73] * 6, temperature=1.0, max_tokens=30, min_tokens=least,
                       logit_bias=bias, **stops)  # fmt: skip
    engine.run()
    engine.assert_all_as_alone()
