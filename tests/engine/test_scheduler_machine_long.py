"""A long life of one engine: traffic that never stops, in a pool that is always too small."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.engine import invariants
from tests.engine.engine_harness import Harness, alone

NUM_STEPS = int(os.environ.get("SIMULATED_STEPS", "1000000"))
CHECK_EVERY = 97  # steps between two checks of all books
COMPARE_EVERY = 50  # requests between two that are compared with themselves alone


def random_request(chance: random.Random) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """(prompt, parameters that decide its tokens, those that decide its place)"""
    family = chance.randrange(3)
    shared = [family * 7 + i for i in range(chance.randrange(40))]
    prompt = shared + [chance.randrange(250) for _ in range(chance.randrange(1, 30))]
    decide = {
        "n": chance.choice([1, 1, 1, 1, 2, 4]),
        "max_tokens": chance.randrange(1, 40),
        "temperature": chance.choice([0.0, 1.0]),
        "seed": chance.randrange(4),
        "stop": chance.choice([(), (), ("e",), ("th", "a ")]),
        "prompt_logprobs": chance.choice([None, None, None, 1]),
    }
    if chance.random() < 0.15:  # the widest, with the longest prompt, need 32 blocks at most
        del decide["temperature"]
        decide |= {"n": chance.randrange(1, 5), "use_beam_search": True, "length_penalty": chance.choice([0.5, 2.0])}
    place = {"priority": chance.randrange(3), "tenant": chance.choice("abc"), "salt": chance.choice("xy")}
    return prompt, decide, place


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_million_steps_without_a_violation() -> None:
    chance = random.Random(20)
    num_steps = num_requests = num_aborted = num_compared = 0
    for policy in ("fcfs", "priority", "deadline", "fair"):
        harness = Harness(
            block_size=8, num_kv_blocks=48, num_host_slots=40, max_num_seqs=10, max_num_batched_tokens=48,
            scheduling_policy=policy, enable_host_prefix_cache=True, max_model_len=120,
        )  # fmt: skip
        harness.runner.checks = False
        expected: dict[str, Any] = {}
        for _ in range(NUM_STEPS // 4):
            num_steps += 1
            while harness.scheduler.num_requests < 14:
                request_id = f"r{num_requests}"
                num_requests += 1
                prompt, decide, place = random_request(chance)
                if num_requests % COMPARE_EVERY == 0:
                    expected[request_id] = alone(tuple(prompt), max_model_len=120, **decide)
                harness.add(request_id, prompt, **{**decide, "stop": list(decide["stop"])}, **place)
            harness.runner.checks = num_steps % CHECK_EVERY == 0
            harness.step(check=harness.runner.checks)
            if chance.random() < 0.01:
                request_id = chance.choice(list(harness.scheduler.roster.requests))
                harness.llm.abort(request_id)
                harness.forget(request_id)
                expected.pop(request_id, None)
                num_aborted += 1
            for request_id in harness.finished:
                if request_id in expected:
                    invariants.outputs_equal_alone(harness.output(request_id), expected.pop(request_id))
                    num_compared += 1
                harness.forget(request_id)
            harness.finished.clear()
        harness.run()
        invariants.nothing_is_held(harness.scheduler)
        stats = harness.llm.stats()
        assert stats.num_preempted_recompute + stats.num_preempted_swap > NUM_STEPS // 4000
        assert stats.num_prefix_hit_tokens and stats.num_swapped_in_blocks and not stats.num_failed_rows
    assert num_aborted and num_compared > num_requests // COMPARE_EVERY // 2
