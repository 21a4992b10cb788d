"""vLLM #6038, #13196: the same seed gives other tokens: in another batch, at another place, the second time.

Kind: randomness that depends on company. Siblings: order of arrival, places in the batch, n, cached prefixes,
preemption, chunks, unseeded neighbours, seeds that are equal modulo 2**64, negative and zero seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.config import LoadedModel
from tests.cases.trial import Trial, prompt_of

SEEDS = (42, 42, 42, 43)


def test_seed_42_three_times_then_43_over_20_prompts(trial: Callable[..., Trial]) -> None:
    """Temperature 1: the first three are equal, in whatever order all of them arrive; 43 mostly differs."""
    asks = [(prompt, place, seed) for prompt in range(20) for place, seed in enumerate(SEEDS)]
    random.Random(12).shuffle(asks)
    engine = trial(max_num_seqs=9, num_kv_blocks=60, max_num_batched_tokens=40)
    for prompt, place, seed in asks:
        engine.add(f"{prompt}/{place}", prompt_of(5 + prompt, seed=prompt), seed=seed, max_tokens=8)
    engine.run()
    num_equal = 0
    for prompt in range(20):
        tokens = [engine.output(f"{prompt}/{place}").choices[0].token_ids for place in range(4)]
        assert tokens[0] == tokens[1] == tokens[2]
        num_equal += tokens[2] == tokens[3]
    assert num_equal <= 2
    engine.assert_all_as_alone()


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_seeds_at_the_ends_of_their_range(trial: Callable[..., Trial], seed: int) -> None:
    engine = trial()
    for same in (seed, seed, seed % 2**64):
        engine.ask(prompt_of(9), seed=same, max_tokens=12)
    outputs = [engine.output(f"ask{index}").choices[0].token_ids for index in range(3)]
    assert (
        outputs[0] == outputs[1] == outputs[2] != engine.ask(prompt_of(9), seed=7, max_tokens=12).choices[0].token_ids
    )


def test_a_choice_is_the_same_whatever_n_is(trial: Callable[..., Trial]) -> None:
    wide = trial().ask(prompt_of(9), n=6, max_tokens=10).choices
    for n in (1, 2, 5):
        assert [choice.token_ids for choice in trial().ask(prompt_of(9), n=n, max_tokens=10).choices] == [
            choice.token_ids for choice in wide[:n]
        ]
    assert len({tuple(choice.token_ids) for choice in wide}) == 6


def test_unseeded_neighbours_change_nothing_and_differ(trial: Callable[..., Trial]) -> None:
    engine = trial()
    for index in range(4):
        engine.add(f"seeded{index}", prompt_of(9), seed=42, max_tokens=10)
        engine.add(f"unseeded{index}", prompt_of(9), seed=None, max_tokens=10)
    engine.run()
    assert len({tuple(engine.output(f"seeded{index}").choices[0].token_ids) for index in range(4)}) == 1
    assert len({tuple(engine.output(f"unseeded{index}").choices[0].token_ids) for index in range(4)}) == 4


@pytest.mark.real_model
def test_on_the_real_model(real: LoadedModel) -> None:
    engine = Trial(real, block_size=16, num_kv_blocks=200)
    for index, seed in enumerate(SEEDS):
        engine.add(f"r{index}", "Name an animal:", seed=seed, max_tokens=8)
        engine.step()
    engine.run()
    tokens = [engine.output(f"r{index}").choices[0].token_ids for index in range(4)]
    assert tokens[0] == tokens[1] == tokens[2] != tokens[3]
