"""vLLM #787, #588, #546: swapping no block or one, in a pool too small for what runs, ends the whole engine.

Kind: the smallest numbers of preemption. Siblings: no host slots, one, fewer than a sequence needs; a sequence
preempted before it computed anything; n = 8 in a pool for one; more choices than seats; the first request alone
cannot fit; beams that can never run together.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import InvalidRequest
from tests.cases.trial import BLOCK, Trial, prompt_of


@pytest.mark.parametrize(
    ("num_host_slots", "mode"), [(0, "swap"), (1, "swap"), (5, "auto"), (64, "swap"), (64, "recompute")]
)
def test_eight_choices_in_a_pool_for_one(trial: Callable[..., Trial], num_host_slots: int, mode: str) -> None:
    """Prompts of one token, one block, and one more; every choice ends, each as alone."""
    engine = trial(num_kv_blocks=5, num_host_slots=num_host_slots, preemption_mode=mode, max_num_seqs=8)
    for index, length in enumerate((1, BLOCK, BLOCK + 1)):
        engine.add(f"r{index}", prompt_of(length), max_tokens=2 * BLOCK + 2, n=8, seed=index, logprobs=0)
    engine.run()
    stats = engine.llm.stats()
    assert stats.num_preempted_recompute + stats.num_preempted_swap > 8
    assert mode != "recompute" or stats.num_preempted_swap == 0
    assert mode != "swap" or num_host_slots < 64 or stats.num_preempted_swap > 0
    engine.assert_all_as_alone()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7])
def test_more_choices_than_seats(trial: Callable[..., Trial], max_num_seqs: int) -> None:
    engine = trial(num_kv_blocks=16, num_host_slots=3, preemption_mode="swap", max_num_seqs=max_num_seqs)
    engine.add("many", prompt_of(11), max_tokens=10, n=8, temperature=1.5)
    engine.add("one", prompt_of(5), max_tokens=10)
    engine.run()
    engine.assert_all_as_alone()


@pytest.mark.parametrize(
    ("num_host_slots", "mode"), [(0, "swap"), (3, "swap"), (40, "auto"), (80, "swap"), (80, "recompute")]
)
def test_eight_beams_in_a_pool_for_eight(trial: Callable[..., Trial], num_host_slots: int, mode: str) -> None:
    """They are preempted and come back together, and end as alone; so do the choices that make them."""
    engine = trial(num_kv_blocks=25, num_host_slots=num_host_slots, preemption_mode=mode,
                   max_num_seqs=32, max_num_batched_tokens=32)  # fmt: skip
    for index, length in enumerate((1, BLOCK, BLOCK + 1)):
        engine.add(f"c{index}", prompt_of(length), max_tokens=2 * BLOCK + 2, n=2, seed=index)
        engine.add(f"b{index}", prompt_of(length), max_tokens=2 * BLOCK + 2, n=8, use_beam_search=True, logprobs=1)
    engine.run()
    stats = engine.llm.stats()
    assert stats.num_preempted_recompute + stats.num_preempted_swap > 2
    assert mode != "swap" or num_host_slots < 80 or stats.num_preempted_swap > 0
    engine.assert_all_as_alone()


def test_preempted_with_nothing_computed(trial: Callable[..., Trial]) -> None:
    """A sequence that started in this very plan, or whose blocks are all cached ones, is preempted again."""
    engine = trial(num_kv_blocks=6, num_host_slots=8, preemption_mode="swap", max_num_seqs=4,
                   max_num_batched_tokens=4, scheduling_policy="priority")  # fmt: skip
    engine.ask(prompt_of(2 * BLOCK), max_tokens=1)
    for index in range(6):
        engine.add(f"r{index}", prompt_of(2 * BLOCK + index % 2), max_tokens=12, priority=6 - index, seed=index)
        engine.step()
    engine.run()
    assert engine.llm.stats().num_preempted_swap > 0
    engine.assert_all_as_alone()


def test_what_can_never_fit_fails_alone_and_at_once(trial: Callable[..., Trial]) -> None:
    engine = trial(num_kv_blocks=4, num_host_slots=8)
    engine.add("fits", prompt_of(20), max_tokens=4 * BLOCK - 20 + 1, n=3)  # its last token is never computed
    with pytest.raises(InvalidRequest, match="prompt: has 32 tokens"):
        engine.add("long", prompt_of(4 * BLOCK), max_tokens=4)
    with pytest.raises(InvalidRequest, match=r"n: is 8 beams, which .* may need 16 KV blocks of 8; the pool has 4"):
        engine.add("beams", prompt_of(4), max_tokens=8, n=8, use_beam_search=True)
    engine.run()
    assert [len(choice.token_ids) for choice in engine.output("fits").choices] == [12] * 3  # up to the pool's context
