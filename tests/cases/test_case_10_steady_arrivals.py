"""vLLM PR #45561, #41951: two seats, long low-priority work, high-priority arrivals without end.

Kind: the order of waiting work. Siblings: preempted work keeps its place before what arrived later; it ages; equal
keys go by arrival; a preempted choice goes before later requests; the order holds under every policy that is fixed
at arrival; choices of one request stay in order.
"""

from __future__ import annotations

import pytest

from tests.engine.engine_harness import WALL_TIME, Harness, alone


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_documented_order_under_steady_arrivals(mode: str) -> None:
    """A level outweighs `priority_seconds` of waiting: with steps of 0.01 s and 0.5 s a level, what arrives within
    50 steps goes before the low ones, what arrives later does not. All finish."""
    harness = Harness(block_size=8, num_kv_blocks=30, num_host_slots=64, max_num_seqs=2, preemption_mode=mode,
                      scheduling_policy="priority", priority_seconds=0.5)  # fmt: skip
    for name in ("low a", "low b"):
        harness.add(name, [1] * 9, priority=1, max_tokens=100, seed=ord(name[-1]))
    harness.step()
    harness.add("high", [2] * 9, priority=0, max_tokens=10)
    num_ran = {"low a": 0, "low b": 0}
    for index in range(60):
        harness.add(f"late {index}", [3] * 8, priority=0, max_tokens=10, seed=index)
        for _ in range(5):
            for delta in harness.step():
                if delta.request_id in num_ran:
                    num_ran[delta.request_id] += 1
    harness.run()
    place = {request_id: place for place, request_id in enumerate(harness.finished)}
    assert len(place) == 63 and place["high"] == 0
    assert place["low a"] < place["low b"], "the one that came first keeps its place"
    assert place["late 8"] < place["low a"] < place["late 40"]
    for name in ("low a", "low b"):
        assert harness.output(name).timeline.num_preemptions >= 1
        expected = alone((1,) * 9, priority=1, max_tokens=100, seed=ord(name[-1]))
        assert harness.output(name).choices == expected.choices


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
def test_equals_go_by_arrival_whatever_preempts_them(policy: str) -> None:
    """A pool for one of them: those that came first finish first, though all of them grow and push one another."""
    harness = Harness(block_size=8, num_kv_blocks=9, max_num_seqs=4, scheduling_policy=policy)
    for index in range(6):
        harness.add(f"r{index}", [index] * 15, max_tokens=40, seed=index)
    harness.run()
    assert harness.finished == [f"r{index}" for index in range(6)]
    assert sum(harness.output(f"r{index}").timeline.num_preemptions for index in range(6)) > 0


def test_a_preempted_choice_goes_before_whatever_came_later() -> None:
    harness = Harness(block_size=8, num_kv_blocks=12, max_num_seqs=8)
    harness.add("first", [1] * 9, n=4, max_tokens=40, seed=1)
    harness.step()
    for index in range(5):
        harness.add(f"later{index}", [2 + index] * 9, max_tokens=3, seed=index)
    harness.run()
    assert harness.output("first").timeline.num_preemptions > 0
    ends = {i: s for s, d in enumerate(harness.deltas["first"]) for c in d.deltas if c.finish_reason for i in [c.index]}
    assert sorted(ends, key=lambda index: (ends[index], index)) == [0, 1, 2, 3]


def test_deadlines_under_steady_arrivals_starve_nobody() -> None:
    harness = Harness(block_size=8, num_kv_blocks=30, max_num_seqs=2, scheduling_policy="deadline")
    harness.add("far", [1] * 9, max_tokens=60, deadline=WALL_TIME + 3)
    harness.step()
    for index in range(150):
        harness.add(f"near{index}", [2] * 9, max_tokens=8, seed=index, deadline=WALL_TIME + harness.clock.now + 0.5)
        for _ in range(5):
            harness.step()
    harness.run()
    assert harness.finished.index("far") < 120
