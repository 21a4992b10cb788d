"""sglang #35270: blocks that a storm of shared prefixes and aborts leaves behind.

Kind: something is held by nobody. Siblings: aborts while waiting, prefilling, decoding, preempted and swapped; of
some choices' siblings; twice; of unknown ids; before the first step; after the end; failing draws; the same id again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.cases.trial import Trial, prompt_of
from tests.engine import invariants
from tests.engine.engine_harness import Harness


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_256_mixed_requests_with_aborts_then_idle(mode: str) -> None:
    """free + cached = total, nothing pinned, nothing waits; the rest ended as it would alone."""
    rng = random.Random(mode)
    harness = Harness(block_size=8, num_kv_blocks=60, num_host_slots=50, max_num_seqs=12, max_num_batched_tokens=48,
                      preemption_mode=mode, scheduling_policy="priority", enable_host_prefix_cache=mode == "swap",
                      fake_eos_every=40)  # fmt: skip
    aborted = 0
    for index in range(256):
        prompt = [*prompt_of(60, seed=index % 7)[: rng.randint(1, 60)], *prompt_of(rng.randint(1, 9), seed=index)]
        prompt = [token_id % 250 for token_id in prompt]
        harness.add(f"r{index}", prompt, max_tokens=rng.randint(1, 40), n=rng.choice([1, 1, 1, 2, 5]), seed=index,
                    priority=rng.randint(0, 2), temperature=rng.choice([0.0, 1.0]))  # fmt: skip
        for _ in range(rng.randint(0, 3)):
            harness.step(check=False)
        if rng.random() < 0.4:
            delta = harness.llm.abort(f"r{rng.randint(0, index)}")
            if delta is not None:
                aborted += 1
                harness.take([delta])
    harness.run()
    assert aborted > 30 and len(harness.finished) == len(set(harness.finished)) == 256
    invariants.nothing_is_held(harness.scheduler)
    stats = harness.llm.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == 60 and stats.num_requests == 0
    assert harness.llm.drop_prefix_cache() == stats.num_cached_blocks
    assert harness.llm.stats().num_free_blocks == 60


def test_the_survivors_of_a_storm_are_as_alone(trial: Callable[..., Trial]) -> None:
    rng = random.Random(6)
    engine = trial(num_kv_blocks=24, num_host_slots=20, preemption_mode="swap", max_num_seqs=6,
                   max_num_batched_tokens=32)  # fmt: skip
    for index in range(40):
        prompt = [*prompt_of(30, seed=index % 3)[: rng.randint(1, 30)], *prompt_of(3, seed=index)]
        engine.add(f"r{index}", prompt, max_tokens=rng.randint(1, 16), n=rng.choice([1, 1, 3]), seed=index)
        for _ in range(rng.randint(0, 2)):
            engine.step()
        if rng.random() < 0.5:
            engine.abort(f"r{rng.randint(0, index)}")
    engine.run()
    assert 10 < len(engine.asked) < 40
    engine.assert_all_as_alone()


def test_aborts_at_every_moment_of_a_life(trial: Callable[..., Trial]) -> None:
    """Before the first step, in the prompt, at the fork, while decoding, at the end; then the id is free again."""
    for num_steps in (0, 1, 2, 3, 4, 7, 11):
        engine = trial(max_num_batched_tokens=16, num_kv_blocks=16)
        engine.add("neighbour", prompt_of(9), max_tokens=30)
        engine.add("r", prompt_of(40), max_tokens=6, n=3)
        for _ in range(num_steps):
            engine.step()
        was_finished = "r" in engine.finished
        delta = engine.llm.abort("r")
        assert (delta is None) == was_finished
        if delta is not None:
            assert delta.finished and {each.finish_reason for each in delta.deltas} <= {"abort"}
        assert engine.llm.abort("r") is None and engine.llm.abort("nobody") is None
        engine.add("r", prompt_of(40), max_tokens=6, n=3)
        engine.run()
        engine.assert_as_alone("neighbour")


def test_aborting_what_waits_in_the_host_store_frees_its_slots(trial: Callable[..., Trial]) -> None:
    engine = trial(num_kv_blocks=8, num_host_slots=16, preemption_mode="swap", scheduling_policy="priority",
                   max_num_seqs=2)  # fmt: skip
    engine.add("low", prompt_of(20), max_tokens=20, priority=5, n=2)
    for _ in range(4):
        engine.step()
    engine.add("high", prompt_of(40, seed=2), max_tokens=12, priority=0, seed=4)
    engine.step()
    assert engine.llm.stats().num_swapped > 0
    engine.abort("low")
    assert engine.llm.stats().num_swapped == 0
    engine.run()
    engine.assert_all_as_alone()
