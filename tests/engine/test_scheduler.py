"""The scheduler's rules one by one, on the real engine over the fake runner; every plan is checked as it goes by."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.costs import StepCosts, StepSize
from engine.errors import InvalidConfig, InvalidRequest
from engine.finish import finish_of
from engine.params import SamplingParams
from engine.plan import Plan
from engine.sequence import Request, Sequence, SequenceState
from tests.engine import invariants
from tests.engine.engine_harness import Harness, alone

BLOCK = 8


def record_plans(harness: Harness) -> list[Plan]:
    """Plans as they were when they were executed: rows of decodes move on afterwards."""
    plans: list[Plan] = []
    execute = harness.runner.execute

    def keep(plan: Plan) -> Any:
        rows = [type(row)(row.sequence, row.start, list(row.token_ids), list(row.block_table), row.num_logits,
                          row.draws, row.num_proposals) for row in plan.rows]  # fmt: skip
        kept = Plan(plan.step_index, rows, plan.num_decodes, plan.copies, plan.swap_out, plan.swap_in)
        plans.append(kept)
        return execute(plan)

    harness.runner.execute = keep  # type: ignore[method-assign]
    return plans


def assert_alone(harness: Harness, request_id: str, prompt: list[int], **params: Any) -> None:
    expected = alone(tuple(prompt), **{k: tuple(v) if isinstance(v, list) else v for k, v in params.items()})
    invariants.outputs_equal_alone(harness.output(request_id), expected)
    invariants.each_thing_told_once(harness.deltas[request_id])


# ---- budget and chunks


def test_decodes_come_first_and_prefill_takes_the_rest_in_chunks() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_batched_tokens=16, max_num_seqs=4)
    plans = record_plans(harness)
    harness.add("short", [1] * 5, max_tokens=20)
    harness.step()
    harness.add("long", [2] * 40, max_tokens=5)
    harness.run()
    assert [len(row.token_ids) for row in plans[0].rows] == [5]
    chunks = [[len(row.token_ids) for row in plan.rows] for plan in plans[1:5]]
    assert chunks == [[1, 15], [1, 15], [1, 10], [1, 1]]
    assert [plan.num_decodes for plan in plans[1:5]] == [1, 1, 1, 2]


@pytest.mark.parametrize("chunk", [5, 7, 8, 9, 16, 17, 64])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_any_chunk_size_gives_the_same(chunk: int, extra: int) -> None:
    """Case 7: chunks below, equal to and no multiple of the block; prompts of chunk-1, chunk, chunk+1."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_batched_tokens=chunk, max_num_seqs=2)
    prompts = [list(range(max(1, chunk + extra))), list(range(100, 130))]
    for index, prompt in enumerate(prompts):
        harness.add(f"r{index}", prompt, max_tokens=12, seed=index, prompt_logprobs=1)
    harness.run()
    for index, prompt in enumerate(prompts):
        assert_alone(harness, f"r{index}", prompt, max_tokens=12, seed=index, prompt_logprobs=1)


def test_a_budget_under_the_seats_is_refused_at_start() -> None:
    with pytest.raises(InvalidConfig, match="max_num_batched_tokens: is 4, under max_num_seqs 5"):
        EngineConfig(max_num_batched_tokens=4, max_num_seqs=5)


def test_prefill_is_cut_to_the_step_time_only_while_something_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "observe", lambda self, *_: None)
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=200, max_num_batched_tokens=400, max_num_seqs=4, max_step_seconds=1.0
    )
    plans = record_plans(harness)
    costs = harness.llm._costs
    costs.seconds_per_prefill_token, costs.seconds_per_decode_step = 0.01, 0.5
    harness.add("a", list(range(200)), max_tokens=3)
    harness.step()
    harness.add("b", list(range(100, 250)), max_tokens=1)
    harness.run()
    assert [[len(row.token_ids) for row in plan.rows] for plan in plans] == [[200], [1, 50], [1, 50], [50]]


def test_prefill_is_slowed_by_a_step_time_that_cannot_be_kept_but_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "observe", lambda self, *_: None)
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_seqs=4, max_step_seconds=0.001)
    plans = record_plans(harness)
    harness.llm._costs.seconds_per_prefill_token = 1.0
    harness.add("a", [1] * 4, max_tokens=30)
    harness.step()
    harness.add("b", [2] * 40, max_tokens=1)
    harness.run()
    assert [len(plan.rows[-1].token_ids) for plan in plans[1:6]] == [BLOCK] * 5


def test_costs_are_told_apart() -> None:
    costs = StepCosts()
    assert costs.num_prefill_tokens_within(1.0) is None
    assert costs.prefers_swap(num_tokens=1, num_blocks=1)  # nothing is known: copying is cheap
    for _ in range(50):
        costs.observe(StepSize(0, num_decoding=4, num_drawn=4), 0.1)
        costs.observe(StepSize(100, num_decoding=4, num_drawn=4), 1.1)
    assert costs.seconds_per_prefill_token == pytest.approx(0.01)
    assert costs.seconds_per_decode_token == pytest.approx(0.025)
    assert costs.num_prefill_tokens_within(0.6) == 50
    costs.seconds_per_block_copy = 0.02
    assert costs.prefers_swap(num_tokens=16, num_blocks=2)
    assert not costs.prefers_swap(num_tokens=16, num_blocks=5)


# ---- forks


def test_forks_share_the_prompt_and_all_but_one_copy_its_last_block() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_seqs=8)
    plans = record_plans(harness)
    harness.add("r", [1] * 20, n=4, max_tokens=3, seed=1)
    harness.run()
    assert [len(plan.copies) for plan in plans] == [0, 3, 0]
    assert len({move.source for move in plans[1].copies}) == 1
    assert_alone(harness, "r", [1] * 20, n=4, max_tokens=3, seed=1)


def test_a_prompt_of_whole_blocks_needs_no_copy() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_seqs=8)
    plans = record_plans(harness)
    harness.add("r", [1] * 16, n=4, max_tokens=10, seed=1)
    harness.run()
    assert sum(len(plan.copies) for plan in plans) == 0


def held_block_steps(harness: Harness) -> list[int]:
    """Blocks held after each step."""
    held = []
    while harness.llm.has_unfinished():
        harness.step()
        held.append(harness.llm.stats().num_held_blocks)
    return held


def test_three_choices_save_most_of_three_copies() -> None:
    """n=3 on a 1,000-token prompt with outputs of at most 110 tokens, against three copies, over the whole run.

    At the end, where the outputs are longest, it is 86 blocks against 210.
    """
    settings: dict[str, Any] = {"block_size": 16, "num_kv_blocks": 400, "max_num_batched_tokens": 4096}
    prompt = [i % 250 for i in range(1000)]
    shared = Harness(**settings)
    shared.add("r", prompt, n=3, max_tokens=110, seed=1)
    with_sharing = held_block_steps(shared)
    copies = Harness(**settings, enable_prefix_caching=False)
    for index in range(3):
        copies.add(f"r{index}", prompt, max_tokens=110, seed=index)
    without = held_block_steps(copies)
    assert (max(with_sharing), max(without)) == (86, 210)
    assert sum(with_sharing) <= 0.4 * sum(without)


def test_choices_beyond_the_seats_wait_for_one() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_seqs=3)
    harness.add("r", [1] * 20, n=8, max_tokens=12, seed=1)
    harness.run()
    assert_alone(harness, "r", [1] * 20, n=8, max_tokens=12, seed=1)


@pytest.mark.parametrize("num_host_slots", [0, 1, 64])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_many_choices_in_a_tiny_pool_finish(num_host_slots: int, mode: str) -> None:
    """Case 5: no swap space or one block of it, a small pool, n=8: all finish, beside another request."""
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=9, num_host_slots=num_host_slots, max_num_seqs=9, preemption_mode=mode
    )
    harness.add("many", [1] * 20, n=8, max_tokens=30, seed=1)
    harness.add("other", [2] * 20, max_tokens=30, seed=2)
    harness.run()
    assert_alone(harness, "many", [1] * 20, n=8, max_tokens=30, seed=1)
    assert_alone(harness, "other", [2] * 20, max_tokens=30, seed=2)
    invariants.nothing_is_held(harness.scheduler)


# ---- memory


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_nothing_that_is_told(mode: str) -> None:
    """Case 8: several preemptions with min_tokens, seed, n=3, stops, logprobs: as if there were none."""
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=14, num_host_slots=100, max_num_seqs=8, preemption_mode=mode,
        enable_prefix_caching=False,
    )  # fmt: skip
    params: dict[str, Any] = {"n": 3, "max_tokens": 40, "min_tokens": 30, "seed": 5, "stop": ["e", "th"],
                              "logprobs": 2, "prompt_logprobs": 1}  # fmt: skip
    prompts = [[index] * 17 for index in range(3)]
    for index, prompt in enumerate(prompts):
        harness.add(f"r{index}", prompt, **params)
    harness.run()
    for index, prompt in enumerate(prompts):
        assert_alone(harness, f"r{index}", prompt, **params)
    preemptions = [harness.output(f"r{index}").timeline.num_preemptions for index in range(3)]
    assert max(preemptions) >= 2
    stats = harness.llm.stats()
    assert (stats.num_preempted_swap > 0) == (mode == "swap")
    invariants.nothing_is_held(harness.scheduler)


def test_the_last_to_come_is_preempted_first_and_returns_to_its_place() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=8, max_num_seqs=3, enable_prefix_caching=False)
    for index in range(3):
        harness.add(f"r{index}", [index] * 14, max_tokens=30)
    harness.run()
    assert harness.finished == ["r0", "r1", "r2"]
    assert harness.output("r0").timeline.num_preemptions == 0


def test_shared_blocks_are_swapped_once() -> None:
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=20, num_host_slots=50, max_num_seqs=5, preemption_mode="swap",
        scheduling_policy="priority",
    )  # fmt: skip
    plans = record_plans(harness)
    harness.add("forks", [1] * 64, n=3, max_tokens=10, seed=1, priority=1)  # eight blocks shared
    for _ in range(3):
        harness.step()
    harness.add("urgent", [2] * 140, max_tokens=2, priority=0)
    harness.run()
    sources = [move.source for plan in plans for move in plan.swap_out]
    assert len(sources) == len(set(sources)) == 8 + 3
    assert_alone(harness, "forks", [1] * 64, n=3, max_tokens=10, seed=1, priority=1)


def test_content_that_is_still_on_the_device_is_not_copied_back() -> None:
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=20, num_host_slots=50, max_num_seqs=1, preemption_mode="swap",
        scheduling_policy="priority",
    )  # fmt: skip
    harness.add("r", [1] * 40, max_tokens=20, seed=1, priority=1)
    harness.step()
    harness.step()
    harness.add("urgent", [2] * 8, max_tokens=2, priority=0)
    harness.run()
    stats = harness.llm.stats()
    assert stats.num_swapped_out_blocks == 6 and stats.num_swapped_in_blocks == 1  # five are found by their hashes
    assert_alone(harness, "r", [1] * 40, max_tokens=20, seed=1, priority=1)


def test_a_request_that_can_never_fit_fails_at_once_with_the_numbers() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=4)
    harness.add("good", [1] * 20, max_tokens=5)
    with pytest.raises(InvalidRequest, match="prompt: has 32 tokens and the context holds 32"):
        harness.add("bad", [1] * 32, max_tokens=1)
    harness.run()
    assert harness.finished == ["good"]


def test_the_scheduler_itself_refuses_what_the_pool_cannot_hold() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=4)
    request = Request("r", [1] * 20, SamplingParams(max_tokens=14), 0)
    request.sequences.append(Sequence(request, 0, 0))
    with pytest.raises(InvalidRequest, match="need 5 KV blocks of 8; the pool has 4"):
        harness.scheduler.add(request)
    assert harness.scheduler.num_requests == 0


def test_a_request_that_fits_exactly_runs() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=4)
    harness.add("r", [1] * 31, max_tokens=1)
    harness.add("s", [1] * 20, max_tokens=12)
    harness.run()
    assert [harness.output(r).choices[0].finish_reason for r in ("r", "s")] == ["length", "length"]


def test_waste_is_the_tail_of_last_blocks() -> None:
    harness = Harness(block_size=16, num_kv_blocks=64)
    harness.add("r", [1] * 20, max_tokens=30)
    harness.step()
    assert harness.llm.stats().kv_waste == 12 / 32
    harness.add("s", [2] * 17, n=2, max_tokens=30)
    harness.step()
    assert harness.llm.stats().kv_waste == pytest.approx((11 + 15) / 64)  # the shared block counts once


def test_waste_on_a_bulk_trace_is_at_most_four_percent() -> None:
    """Lengths like those of 32 real documents: at each step, block size 16."""
    lengths = random.Random(1)
    harness = Harness(block_size=16, num_kv_blocks=1200, max_num_seqs=32, max_num_batched_tokens=512)
    for index in range(32):
        harness.add(f"r{index}", [index] * lengths.randint(120, 600), max_tokens=lengths.randint(20, 64))
    allocated = unused = 0.0
    while harness.llm.has_unfinished():
        harness.step()
        stats = harness.llm.stats()
        allocated += stats.num_held_blocks * 16
        unused += stats.kv_waste * stats.num_held_blocks * 16
    assert unused / allocated <= 0.04


def test_what_is_promised_to_a_prefill_is_not_given_away() -> None:
    """A prompt stalls two blocks short of its end; a later one that would fit the last block does not pass it."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=10, max_num_batched_tokens=17, max_num_seqs=4)
    harness.add("grows", [1] * 15, max_tokens=14)
    harness.step()
    harness.add("stalls", [2] * 64, max_tokens=3)
    harness.add("small", [3] * 8, max_tokens=1)
    harness.run()
    assert harness.finished[0] == "grows"
    assert harness.output("stalls").timeline.num_preemptions == 0


def test_a_request_starts_with_seats_for_all_its_choices() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_seqs=4)
    for request_id in ("a", "b"):
        harness.add(request_id, [1] * 4, max_tokens=10)
    harness.step()
    harness.add("forks", [2] * 4, n=3, max_tokens=4)
    harness.run()
    timeline = harness.output("forks").timeline
    assert timeline.num_preemptions == 0 and timeline.queued_seconds == pytest.approx(0.10)


def test_a_block_that_two_fill_in_turn_is_swapped_as_each_left_it() -> None:
    """Siblings share a part-filled block: one is swapped out, the other writes on in place and is swapped out later."""
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=5, num_host_slots=30, max_num_seqs=4, preemption_mode="swap",
        enable_prefix_caching=False,
    )  # fmt: skip
    harness.add("first", [1] * 14, max_tokens=20, seed=1)
    harness.add("forks", [2] * 20, n=2, max_tokens=12, seed=2)
    harness.run()
    assert harness.output("forks").timeline.num_swaps >= 2
    assert_alone(harness, "first", [1] * 14, max_tokens=20, seed=1)
    assert_alone(harness, "forks", [2] * 20, n=2, max_tokens=12, seed=2)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_sequence_that_was_to_copy_a_block_can_be_preempted_by_the_same_plan(mode: str) -> None:
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=12, num_host_slots=30, max_num_seqs=4, preemption_mode=mode,
        scheduling_policy="priority", enable_prefix_caching=False,
    )  # fmt: skip
    plans = record_plans(harness)
    harness.add("forks", [2] * 20, n=3, max_tokens=12, seed=2, priority=1)
    harness.step()
    harness.add("urgent", [1] * 70, max_tokens=4, seed=1, priority=0)
    harness.run()
    assert not plans[1].copies and [row.sequence.request.request_id for row in plans[1].rows] == ["urgent"]
    assert_alone(harness, "forks", [2] * 20, n=3, max_tokens=12, seed=2, priority=1)
    assert_alone(harness, "urgent", [1] * 70, max_tokens=4, seed=1, priority=0)


# ---- coming and going


def test_mixed_traffic_with_aborts_leaves_nothing() -> None:
    """Case 6: 256 requests that share prefixes, many aborted: free + cached = total."""
    chance = random.Random(7)
    harness = Harness(block_size=BLOCK, num_kv_blocks=60, num_host_slots=20, max_num_seqs=12, max_num_batched_tokens=64)
    for index in range(256):
        prompt = [i % 250 for i in range(chance.randint(1, 60))] + [index % 250]
        harness.add(f"r{index}", prompt, n=chance.choice([1, 1, 3]), max_tokens=chance.randint(1, 30), seed=index)
        for _ in range(chance.randint(0, 3)):
            harness.step()
        if chance.random() < 0.4:
            delta = harness.llm.abort(f"r{chance.randint(0, index)}")
            if delta is not None:
                harness.take([delta])
    harness.run()
    invariants.nothing_is_held(harness.scheduler)
    assert sorted(harness.finished) == sorted(harness.deltas)


def test_an_abort_frees_blocks_before_the_next_step() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, enable_prefix_caching=False)
    harness.add("r", [1] * 30, n=3, max_tokens=30)
    for _ in range(4):
        harness.step()
    delta = harness.llm.abort("r")
    assert delta is not None and delta.finished
    assert [choice.finish_reason for choice in delta.deltas] == ["abort"] * 3
    invariants.nothing_is_held(harness.scheduler)
    assert harness.llm.abort("r") is None and not harness.llm.has_unfinished()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_abort_at_any_stage_is_clean(num_steps: int) -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_batched_tokens=16, max_num_seqs=4)
    harness.add("r", [1] * 30, n=3, max_tokens=30)
    for _ in range(num_steps):
        harness.step()
    assert harness.llm.abort("r") is not None
    invariants.nothing_is_held(harness.scheduler)


def test_a_full_engine_does_not_look_at_the_queue() -> None:
    """Flat in the queue's length: steps of a full engine touch no waiting request."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=400, max_num_seqs=4)
    for index in range(2000):
        harness.add(f"r{index}", [index % 250] * 4, max_tokens=200)
    for _ in range(3):
        harness.step()
    waiting = harness.scheduler.roster.waiting
    touched: list[str] = []
    heap = waiting._heap

    class Watched(list):
        def __getitem__(self, index: Any) -> Any:
            touched.append(str(index))
            return super().__getitem__(index)

    waiting._heap = Watched(heap)
    scheduler = harness.scheduler
    for _ in range(10):
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, harness.runner.execute(plan))
    assert len(touched) <= 10 * 2


def test_request_ids_are_unique_while_in_use() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    harness.add("r", [1], max_tokens=1)
    with pytest.raises(InvalidRequest, match="request_id: 'r' is in use"):
        harness.add("r", [2], max_tokens=1)
    harness.run()
    harness.add("r", [2], max_tokens=1)
    harness.run()


def test_nothing_changes_while_a_plan_is_executed() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    harness.add("r", [1], max_tokens=2)
    scheduler = harness.scheduler
    plan = scheduler.plan(0.0)
    for call in (lambda: scheduler.plan(0.0), lambda: scheduler.abort("r"), lambda: scheduler.add(plan)):
        with pytest.raises(RuntimeError, match="commit or abandon it first"):
            call()
    with pytest.raises(RuntimeError, match="not the plan"):
        scheduler.commit(Plan(0), harness.runner.execute(plan))


def test_states_change_only_as_the_table_says() -> None:
    request = Request("r", [1], SamplingParams(), 0)
    sequence = Sequence(request, 0, 0)
    with pytest.raises(RuntimeError, match="WAITING"):
        sequence.move_to(SequenceState.SWAPPED)
    sequence.move_to(SequenceState.RUNNING)
    sequence.move_to(SequenceState.FINISHED)
    with pytest.raises(RuntimeError):
        sequence.move_to(SequenceState.RUNNING)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([], None), ([5], None), ([9], None), ([5, 9], ("stop", None)), ([5, 7], ("stop", 7)), ([7], None),
        ([5, 5, 5], ("length", None)), ([5, 5, 9], ("stop", None)), ([5, 5, 5, 5], ("length", None)),
    ],
)  # fmt: skip
def test_what_ends_a_sequence(outputs: list[int], expected: object) -> None:
    params = SamplingParams(max_tokens=3, min_tokens=2)
    request = Request("r", [1], params, 0, eos_token_ids=frozenset({9}), stop_token_ids=frozenset({7, 9}))
    assert finish_of(Sequence(request, 0, 0, outputs)) == expected


# ---- failures


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_steps_that_fail_at_first_cost_nobody_a_token(where: str, mode: str, caching: bool, every: int) -> None:
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=14, num_host_slots=50, max_num_seqs=8, preemption_mode=mode,
        enable_prefix_caching=caching, enable_host_prefix_cache=caching,
    )  # fmt: skip
    prompts = [[index] * 19 for index in range(4)]
    for index, prompt in enumerate(prompts):
        harness.add(f"r{index}", prompt, n=2, max_tokens=25, seed=index)
    for step in itertools.count():
        if not harness.llm.has_unfinished():
            break
        if step % every == 0:
            harness.runner.fail_next = where  # forks, swaps and copies are hit, going out and coming back
        harness.step()
    assert harness.runner.num_failures > 25 / every
    for index, prompt in enumerate(prompts):
        assert_alone(harness, f"r{index}", prompt, n=2, max_tokens=25, seed=index)
    invariants.nothing_is_held(harness.scheduler)


def test_prefixes_whose_copy_to_the_host_failed_are_not_found_there() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=8, num_host_slots=32, enable_host_prefix_cache=True)
    prompt = list(range(33))
    harness.add("first", prompt, max_tokens=2, seed=1)
    harness.run()
    harness.add("filler", list(range(100, 160)), max_tokens=2)
    while harness.llm.has_unfinished():
        harness.runner.fail_next = "before"
        harness.step()
    harness.add("again", prompt, max_tokens=2, seed=1)
    harness.run()
    assert harness.output("again").num_cached_tokens == 0
    assert_alone(harness, "again", prompt, max_tokens=2, seed=1)


def test_an_interrupted_step_can_be_made_again() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    execute = harness.runner.execute

    def interrupt(plan: Plan) -> Any:
        harness.runner.execute = execute  # type: ignore[method-assign]
        raise KeyboardInterrupt

    harness.add("r", [1] * 20, n=3, max_tokens=12, seed=1)
    for _ in range(4):
        harness.step()
        harness.runner.execute = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            harness.step()
    harness.run()
    assert_alone(harness, "r", [1] * 20, n=3, max_tokens=12, seed=1)
