"""vLLM #7047: prompts of 1 to 3 tokens, and text without repetition, beside repetitive text.

Kind: what a neighbour's pattern does to a row. Siblings: prompts shorter than any n-gram, one token over and over,
greedy loops beside sampling, outputs that repeat the prompt; with small chunks and pools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.config import LoadedModel
from tests.cases.trial import Trial, prompt_of

PROMPTS = [
    [7],
    [7, 7],
    [7, 8, 7],
    list(range(3, 63)),  # nothing repeats
    [20, 21] * 30,
    [9] * 40,
    prompt_of(17),
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 9},
        {"num_kv_blocks": 20, "num_host_slots": 9},
        {"speculative": "ngram", "speculative_adaptive": False},
        {"speculative": "suffix", "speculative_adaptive": False, "num_kv_blocks": 20, "num_host_slots": 9},
        {"speculative": "suffix", "speculative_adaptive": False, "max_num_batched_tokens": 18},
    ],
)
def test_each_equals_solo_beside_the_others(any_tiny: LoadedModel, changes: dict[str, Any]) -> None:
    engine = Trial(any_tiny, **changes)
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"greedy{index}", prompt, temperature=0.0, max_tokens=16, logprobs=1)
        engine.add(f"seeded{index}", prompt, temperature=1.0, max_tokens=9, seed=index)
    engine.run()
    engine.assert_all_as_alone()


def test_prompts_of_one_token_from_every_end_of_the_vocabulary(trial: Callable[..., Trial]) -> None:
    engine = trial()
    for token_id in (0, 1, 2, 3, 318, 319):
        engine.add(f"r{token_id}", [token_id], temperature=0.0, max_tokens=8)
    engine.run()
    engine.assert_all_as_alone()
