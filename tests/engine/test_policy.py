"""Orders of the policies, and that whatever waits comes first in the end."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.params import SamplingParams
from engine.policy import FairShare, make_policy
from engine.sequence import Request, Sequence
from tests.engine.engine_harness import WALL_TIME, Harness, alone


def request(*, arrival: float = 0.0, tenant: str = "t", deadline: float | None = None, **params: Any) -> Request:
    made = Request(
        "r", [1] * 10, SamplingParams(**{"max_tokens": 10, **params}), 0, arrival=arrival, tenant=tenant,
        deadline=deadline,
    )  # fmt: skip
    made.sequences = [Sequence(made, choice, 0) for choice in range(made.params.n)]
    return made


def order(policy_name: str, *requests: Request) -> list[int]:
    policy = make_policy(EngineConfig(scheduling_policy=policy_name, priority_seconds=10))
    for index, each in enumerate(requests):
        each.key, each.arrival_index = policy.key(each), index
    return [each.arrival_index for each in sorted(requests, key=lambda each: (each.key, each.arrival_index))]


def test_first_come_first_served() -> None:
    assert order("fcfs", request(arrival=1), request(arrival=0, priority=9), request(arrival=2)) == [1, 0, 2]


def test_lower_priority_goes_first_until_waiting_outweighs_it() -> None:
    assert order("priority", request(priority=1), request(priority=-1), request(priority=0)) == [1, 2, 0]
    assert order("priority", request(arrival=0, priority=1), request(arrival=9.9, priority=0)) == [1, 0]
    assert order("priority", request(arrival=0, priority=1), request(arrival=10.1, priority=0)) == [0, 1]


def test_earliest_deadline_goes_first_and_none_waits_forever() -> None:
    assert order("deadline", request(), request(deadline=50), request(deadline=5)) == [2, 1, 0]
    assert order("deadline", request(arrival=0), request(arrival=601, deadline=601)) == [0, 1]
    assert order("deadline", request(arrival=1), request(arrival=700, deadline=-1e9)) == [0, 1]  # long past is now


def test_tenants_take_turns_whatever_each_brings() -> None:
    requests = [request(tenant="a") for _ in range(6)] + [request(tenant="b") for _ in range(2)]
    assert order("fair", *requests)[:4] == [0, 6, 1, 7]


def test_a_tenant_that_was_idle_gets_its_share_and_no_arrears() -> None:
    policy = FairShare()
    busy = [request(tenant="a") for _ in range(10)]
    for each in busy:
        each.key = policy.key(each)
    for each in busy[:5]:
        policy.started(each)
    newcomer = request(tenant="b")
    assert busy[4].key <= policy.key(newcomer) <= busy[5].key


def test_a_tenant_is_charged_what_was_computed() -> None:
    policy = FairShare()
    short = request(tenant="a", max_tokens=10_000)
    short.key = policy.key(short)
    policy.started(short)
    short.first_scheduled = 0.0
    policy.finished(short)  # it ended at once: 10 prompt tokens, no output
    policy._virtual_tokens = 0.0
    assert policy.key(request(tenant="a")) == 10


def test_an_aborted_request_is_not_charged() -> None:
    policy = FairShare()
    gone = request(tenant="a", max_tokens=10_000)
    policy.key(gone)
    policy.finished(gone)
    assert policy.key(request(tenant="a")) == 0 and policy._num_waiting["a"] == 1


def test_a_flood_of_new_tenants_starves_nobody() -> None:
    policy = FairShare()
    waiting = [request(tenant="patient") for _ in range(5)]
    for each in waiting:
        each.key = policy.key(each)
    for index in range(2000):
        newcomer = request(tenant=f"new{index}")
        newcomer.key = policy.key(newcomer)
        if newcomer.key > waiting[-1].key:
            break
        policy.started(newcomer)
    else:
        pytest.fail("new tenants go before a waiting request forever")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_burst_of_high_priority_preempts_and_all_finish(mode: str) -> None:
    """Case 9: full of low priority, then a burst of high: all finish, each equal to itself alone."""
    harness = Harness(
        block_size=8, num_kv_blocks=24, num_host_slots=64, max_num_seqs=4, scheduling_policy="priority",
        preemption_mode=mode,
    )  # fmt: skip
    for index in range(4):
        harness.add(f"low{index}", [index] * 20, priority=1, max_tokens=30, seed=index)
    for _ in range(6):
        harness.step()
    for index in range(6):
        harness.add(f"high{index}", [50 + index] * 12, priority=0, max_tokens=10, seed=index)
    harness.run()
    assert all(request_id.startswith("high") for request_id in harness.finished[:6])
    assert sum(harness.output(f"low{index}").timeline.num_preemptions for index in range(4)) >= 4
    for index in range(4):
        expected = alone((index,) * 20, priority=1, max_tokens=30, seed=index)
        assert harness.output(f"low{index}").choices == expected.choices


def test_preempted_work_keeps_its_place_among_steady_arrivals() -> None:
    """Case 10: two seats, two long low jobs, then high ones steadily: low work goes on as soon as it has aged."""
    harness = Harness(
        block_size=8, num_kv_blocks=40, max_num_seqs=2, scheduling_policy="priority", priority_seconds=0.5
    )
    for index in range(2):
        harness.add(f"low{index}", [index] * 10, priority=1, max_tokens=60, seed=index)
    harness.step()
    for index in range(200):
        harness.add(f"high{index}", [100] * 8, priority=0, max_tokens=10, seed=index)
        for _ in range(5):  # a high job takes ten steps, one arrives every five: two seats are just enough
            harness.step()
    harness.run()
    place = {request_id: place for place, request_id in enumerate(harness.finished)}
    assert place["high0"] < place["high1"] < place["low0"] < place["low1"] < place["high50"]
    assert len(place) == 202


def test_fcfs_never_preempts_for_an_arrival() -> None:
    harness = Harness(block_size=8, num_kv_blocks=40, max_num_seqs=1)
    harness.add("first", [1] * 10, max_tokens=20, priority=5)
    harness.step()
    harness.add("second", [2] * 10, max_tokens=2, priority=-5)
    harness.run()
    assert harness.finished == ["first", "second"]
    assert harness.output("first").timeline.num_preemptions == 0


def test_deadlines_order_running_work_too() -> None:
    harness = Harness(block_size=8, num_kv_blocks=40, max_num_seqs=1, scheduling_policy="deadline")
    harness.add("later", [1] * 10, max_tokens=20, deadline=WALL_TIME + 100)
    harness.step()
    harness.add("sooner", [2] * 10, max_tokens=2, deadline=WALL_TIME + 5)
    harness.add("hardly sooner", [2] * 10, max_tokens=2, deadline=WALL_TIME + 99.9)
    harness.run()
    assert harness.finished == ["sooner", "hardly sooner", "later"]
    assert harness.output("later").timeline.num_preemptions == 1
