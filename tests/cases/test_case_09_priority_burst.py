"""vLLM #23347, #9342: full of low priority, a burst of high priority stops or breaks the engine.

Kind: work is taken from for others. Siblings: pool and seats full at once; victims in the middle of a prompt, of a
fork, just started; the burst shares the victims' prefixes; two bursts; n > 1 on both sides; deadlines instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases.trial import Trial, prompt_of


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("num_steps", [1, 2, 6])
def test_all_of_a_burst_and_its_victims_finish(trial: Callable[..., Trial], mode: str, num_steps: int) -> None:
    """Low priority fills the pool and the seats, in its prompts or behind them; all finish, each equal to solo."""
    engine = trial(num_kv_blocks=30, num_host_slots=64, max_num_seqs=6, max_num_batched_tokens=32,
                   scheduling_policy="priority", preemption_mode=mode)  # fmt: skip
    for index in range(5):
        engine.add(f"low{index}", prompt_of(26 + index), max_tokens=14, priority=3, seed=index, n=1 + index // 4)
    for _ in range(num_steps):
        engine.step()
    for index in range(6):
        engine.add(f"high{index}", prompt_of(20, seed=index % 2), max_tokens=8, priority=0, seed=index, n=2)
    engine.run()
    assert set(engine.finished[:6]) == {f"high{index}" for index in range(6)}
    assert sum(engine.output(f"low{index}").timeline.num_preemptions for index in range(5)) >= num_steps // 2
    engine.assert_all_as_alone()


@pytest.mark.parametrize("policy", ["priority", "deadline", "fair"])
def test_bursts_of_every_level_in_turn(trial: Callable[..., Trial], policy: str) -> None:
    rng = random.Random(policy)
    engine = trial(num_kv_blocks=16, num_host_slots=10, max_num_seqs=3, max_num_batched_tokens=24,
                   scheduling_policy=policy)  # fmt: skip
    for index in range(15):
        given: dict[str, Any] = {"priority": -index // 4, "tenant": str(index % 3)}
        if index % 3:
            given["deadline"] = 10.0**9 - index
        given["max_tokens"] = rng.randint(1, 12)
        engine.add(f"r{index}", prompt_of(rng.randint(1, 60), seed=index % 4), seed=index, **given)
        for _ in range(rng.randint(0, 2)):
            engine.step()
    engine.run()
    engine.assert_all_as_alone()


@pytest.mark.real_model
def test_a_burst_on_the_real_model(real: Any) -> None:
    engine = Trial(real, block_size=16, num_kv_blocks=9, num_host_slots=32, max_num_seqs=3, preemption_mode="swap",
                   scheduling_policy="priority")  # fmt: skip
    for index, text in enumerate(("The quick brown fox", "Once upon a time, in a far land,")):
        engine.add(f"low{index}", text, max_tokens=9, priority=2, temperature=0.8, presence_penalty=0.5, seed=index)
    for _ in range(6):
        engine.step()
    engine.add("high", "Water boils at a temperature of " * 18, max_tokens=3, priority=0, temperature=0.0)
    engine.run()
    assert engine.finished[0] == "high" and engine.llm.stats().num_preempted_swap >= 1
    engine.assert_all_as_alone()
