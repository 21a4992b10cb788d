"""vLLM #16832, #8844, PR #5349: what a request has counted so far is lost or counted twice when it is preempted.

Kind: state beside the tokens. Siblings: penalties, min_tokens, seeds and choices, stop strings half matched, half a
character held back, bad words half written, logprobs and cumulative logprobs, deltas, timelines; by recompute and by
swap; preempted twice and more; and the same for what goes on behind emitted tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases.trial import Trial, prompt_of

KINDS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5, "min_tokens": 14, "n": 3},
    "frequency": {"frequency_penalty": 2.0, "repetition_penalty": 1.3, "temperature": 0.0},
    "reward": {"presence_penalty": -2.0, "frequency_penalty": -2.0, "n": 2, "temperature": 1.4},
    "ends": {"min_tokens": 9, "ignore_eos": False, "logit_bias": {2: 5.0, 40: 4.0}, "stop_token_ids": [40], "n": 3},
    "stops": {"stop": ["e", "a "], "min_tokens": 9, "n": 2, "include_stop_str_in_output": True},
    "words": {"bad_words": ["ing", " the", "e"], "logit_bias": {72: 3.0}},
    "filtered": {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8, "logprobs": 3, "n": 2},
}


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_at_least_twice_is_as_never_preempted(trial: Callable[..., Trial], kind: str, mode: str) -> None:
    """Tokens, ends, logprobs, joined deltas; nothing is told twice."""
    params = {"max_tokens": 20, "seed": 8, "logprobs": 0, "priority": 9, **KINDS[kind]}
    engine = trial(num_kv_blocks=14, num_host_slots=64, preemption_mode=mode, scheduling_policy="priority",
                   max_num_seqs=4)  # fmt: skip
    engine.add("low", prompt_of(18, seed=5), **params)
    for index in range(3):
        for _ in range(3):
            engine.step()
        engine.add(f"high{index}", prompt_of(100, seed=index), max_tokens=3, priority=0, seed=index)
        while f"high{index}" not in engine.finished:
            engine.step()
    engine.run()
    timeline = engine.output("low").timeline
    assert timeline.num_preemptions >= 2
    assert timeline.num_swaps == (timeline.num_preemptions if mode == "swap" else 0)
    engine.assert_all_as_alone()


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_of_kinds_in_a_pool_for_two(trial: Callable[..., Trial], seed: int) -> None:
    rng = random.Random(seed)
    engine = trial(num_kv_blocks=rng.randint(7, 12), num_host_slots=rng.choice([0, 4, 30]), max_num_seqs=6,
                   preemption_mode=rng.choice(["swap", "auto"]), max_num_batched_tokens=rng.choice([6, 11, 64]),
                   scheduling_policy=rng.choice(["fcfs", "priority", "fair"]))  # fmt: skip
    for index in range(7):
        merged = KINDS[rng.choice(list(KINDS))] | KINDS[rng.choice(list(KINDS))]
        params = {"max_tokens": 16, "seed": rng.randint(0, 3), "priority": rng.randint(0, 3), **merged}
        engine.add(f"r{index}", prompt_of(rng.randint(1, 30), seed=index % 3), tenant=rng.choice("ab"), **params)
        for _ in range(rng.randint(0, 5)):
            engine.step()
    engine.run()
    assert engine.llm.stats().num_preempted_swap + engine.llm.stats().num_preempted_recompute >= 2
    engine.assert_all_as_alone()


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_on_elsewhere_counts_what_it_has_emitted(trial: Callable[..., Trial], kind: str) -> None:
    """A worker's death after any number of tokens is the same kind: tokens are handed over, the rest is replayed."""
    params = {"max_tokens": 20, "seed": 8, "logprobs": 0, **KINDS[kind]}
    first = trial()
    whole = first.ask(prompt_of(18, seed=5), **params)
    for num_emitted in (1, 8, 19):
        emitted = [choice.token_ids[: num_emitted + choice.index] for choice in whole.choices]
        engine = trial(max_num_batched_tokens=16)
        engine.add("r", prompt_of(18, seed=5), emitted=emitted, **params)
        engine.run()
        for before, choice, found in zip(emitted, whole.choices, _rest(engine), strict=True):
            assert before + found["token_ids"] == choice.token_ids
            assert choice.text.endswith(found["text"])
            assert found["ends"] == [(choice.finish_reason, choice.stop_reason)]
            assert found["logprobs"] == (choice.logprobs or [])[len(before) :]


def _rest(engine: Trial) -> list[dict[str, Any]]:
    """What the deltas of `r` say of each choice, which may be nothing but its end."""
    num_choices = engine.asked["r"][1].get("n", 1)
    found: list[dict[str, Any]] = [
        {"token_ids": [], "text": "", "logprobs": [], "ends": []} for _ in range(num_choices)
    ]
    for delta in engine.deltas["r"]:
        for each in delta.deltas:
            found[each.index]["token_ids"] += each.token_ids
            found[each.index]["text"] += each.text
            found[each.index]["logprobs"] += each.logprobs or []
            if each.finish_reason is not None:
                found[each.index]["ends"].append((each.finish_reason, each.stop_reason))
    return found
