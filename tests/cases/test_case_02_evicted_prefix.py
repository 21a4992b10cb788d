"""vLLM PR #18957: a waiting request counts on a cached prefix that another request evicts before it runs.

Kind: what was found is gone when it is used. Siblings: evicted after a preemption, partly evicted (the end first),
evicted while it is being counted on for admission, a whole cache dropped, a prefix that is evicted and computed again
by a third request meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.cases.trial import BLOCK, Trial, prompt_of


@pytest.mark.parametrize(("num_evicting", "num_left"), [(30, 2), (36, 1), (44, 0)])
def test_a_prefix_is_evicted_between_arrival_and_start(
    trial: Callable[..., Trial], num_evicting: int, num_left: int
) -> None:
    """1 leaves its prefix; 3 runs, 2 (which shares 1's prefix) waits; 3 evicts part or all of it; 2 equals solo."""
    engine = trial(num_kv_blocks=8, max_num_seqs=1)
    shared = prompt_of(3 * BLOCK)
    engine.ask(shared, max_tokens=2)
    engine.add("three", prompt_of(num_evicting, seed=3), max_tokens=16)
    engine.step()
    engine.add("two", [*shared, 7], max_tokens=9, logprobs=1)
    engine.run()
    assert engine.output("two").num_cached_tokens == num_left * BLOCK
    engine.assert_all_as_alone()


def test_the_found_blocks_are_not_evicted_for_the_rest_of_the_same_request(trial: Callable[..., Trial]) -> None:
    """All blocks are cached, the prefix least recently used of all: growing must take the others."""
    engine = trial(num_kv_blocks=8)
    shared = prompt_of(3 * BLOCK)
    engine.ask(shared, max_tokens=1)
    engine.ask(prompt_of(5 * BLOCK, seed=9), max_tokens=1)
    output = engine.ask([*shared, *prompt_of(4 * BLOCK, seed=8)], max_tokens=BLOCK)
    assert output.num_cached_tokens == 3 * BLOCK
    engine.assert_all_as_alone()


def test_the_cache_is_dropped_under_waiting_and_running_requests(trial: Callable[..., Trial]) -> None:
    engine = trial(num_kv_blocks=32, max_num_seqs=2)
    shared = prompt_of(3 * BLOCK)
    engine.ask(shared, max_tokens=1)
    for index in range(5):
        engine.add(f"r{index}", [*shared, index + 3], max_tokens=20, seed=index)
    for _ in range(30):
        engine.step()
        engine.llm.drop_prefix_cache()
    engine.run()
    engine.assert_all_as_alone()


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_that_always_evicts(trial: Callable[..., Trial], seed: int) -> None:
    """Random prompts over a few shared beginnings in a pool that holds hardly one of them."""
    rng = random.Random(seed)
    swap = {"num_host_slots": rng.choice([0, 6, 64]), "preemption_mode": rng.choice(["swap", "recompute"])}
    engine = trial(num_kv_blocks=rng.randint(9, 14), max_num_seqs=rng.randint(1, 4), **swap)
    beginnings = [prompt_of(rng.randint(1, 40), seed=index) for index in range(3)]
    for index in range(12):
        begin = rng.choice(beginnings)
        prompt = [*begin[: rng.randint(1, len(begin))], *prompt_of(rng.randint(1, 12), seed=index % 4)]
        engine.add(f"r{index}", prompt, max_tokens=rng.randint(1, 18), seed=index, n=rng.choice([1, 1, 2]))
        for _ in range(rng.randint(0, 6)):
            engine.step()
    engine.run()
    engine.assert_all_as_alone()
    assert engine.llm.stats().num_prefix_hit_tokens > 0
