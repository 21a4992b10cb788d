"""Beams over the paged cache: what they share, and that neither company nor a lack of room changes them."""

from __future__ import annotations

from typing import Any

import pytest

from engine import EngineConfig, InvalidRequest, SamplingParams
from engine.plan import Plan, Sampled
from tests.engine import invariants
from tests.engine.engine_harness import Harness, alone
from tests.engine.test_scheduler import record_plans

BLOCK = 8
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 4, "max_tokens": 40, "length_penalty": 0.7}


def assert_alone(harness: Harness, request_id: str, prompt: list[int], **params: Any) -> None:
    expected = alone(tuple(prompt), **{k: tuple(v) if isinstance(v, list) else v for k, v in params.items()})
    invariants.outputs_equal_alone(harness.output(request_id), expected)
    invariants.each_thing_told_once(harness.deltas[request_id])


# ---- what they share


def test_beams_share_what_they_have_in_common() -> None:
    """Far fewer blocks than four copies: the prompt once, and of the outputs what the beams have in common."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=256, max_num_seqs=8)
    prompt, most = [5] * 200, 0
    harness.add("r", prompt, **BEAMS)
    while harness.llm.has_unfinished():
        harness.step()
        most = max(most, harness.llm.stats().num_held_blocks)
    copies = 4 * -(-(200 + 40) // BLOCK)
    assert most <= 25 + 4 * 5  # the whole blocks of the prompt, and in the worst case all others four times
    assert most / copies < 0.35
    assert_alone(harness, "r", prompt, **BEAMS)


def test_only_the_block_in_the_making_is_ever_copied() -> None:
    """However beams fork, drop and trade places: a step copies at most one block less than there are beams."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_seqs=8, enable_prefix_caching=False)
    plans = record_plans(harness)
    harness.add("r", [5] * 20, **BEAMS)
    harness.run()
    assert sum(len(plan.copies) for plan in plans) > 4  # they did fork
    for plan in plans:
        assert len(plan.copies) < 4
        written = {row.block_table[row.start // BLOCK] for row in plan.rows}
        assert {move.target for move in plan.copies} <= written
    at_borders = [plan for plan in plans if plan.rows[0].start % BLOCK == 0 and plan.num_decodes]
    assert at_borders and not any(plan.copies for plan in at_borders)


def test_one_row_for_each_beam_and_none_for_hypotheses() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_seqs=8)
    plans = record_plans(harness)
    harness.add("r", [5] * 20, **BEAMS)
    harness.run()
    assert [len(plan.rows) for plan in plans] == [1] + [4] * 39
    assert harness.llm.stats().num_computed_tokens == 20 + 4 * 39
    assert harness.llm.stats().num_generated_tokens == 4 * 40


# ---- nothing changes them


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("num_batched", [12, 13, 64])
def test_preempted_beams_end_as_undisturbed_ones(mode: str, num_batched: int) -> None:
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=30, num_host_slots=60, max_num_seqs=12, preemption_mode=mode,
        max_num_batched_tokens=num_batched,
    )  # fmt: skip
    asks: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for index in range(4):
        prompt = [7 * index + i for i in range(11 + 5 * index)]
        asks[f"b{index}"] = prompt, {**BEAMS, "early_stopping": [False, True, "never", False][index], "logprobs": 1,
                                     "stop_token_ids": [ord("7"), ord("q")]}  # fmt: skip
        asks[f"c{index}"] = prompt, {"n": 3, "seed": index, "max_tokens": 30}
        asks[f"o{index}"] = prompt, {"n": 1, "best_of": 3, "seed": index, "max_tokens": 30}
    for request_id, (prompt, params) in asks.items():
        harness.add(request_id, prompt, **params)
    harness.run()
    stats = harness.llm.stats()
    assert stats.num_preempted_recompute or mode == "swap"
    assert stats.num_preempted_swap or mode != "swap"
    for request_id, (prompt, params) in asks.items():
        assert_alone(harness, request_id, prompt, **params)
    invariants.nothing_is_held(harness.scheduler)


def test_beams_that_are_computed_again_compute_what_they_share_once() -> None:
    """Of the prompt and the beginning that all beams have in common, no token is computed for each of them."""
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=64, max_num_seqs=8, preemption_mode="recompute", enable_prefix_caching=False
    )
    plans = record_plans(harness)
    harness.add("r", [5] * 50, **BEAMS)
    for _ in range(20):
        harness.step()
    (request,) = harness.scheduler.roster.requests.values()
    outputs = [sequence.output_token_ids for sequence in request.sequences]
    num_common = next(i for i in range(20) if len({output[i] for output in outputs}) > 1)
    num_before = len(plans)
    harness.scheduler.roster.preempt(request.sequences[2])
    invariants.beams_stay_together(harness.scheduler)
    assert len(harness.scheduler.roster.running) == 0 and len(harness.scheduler.roster.waiting) == 1
    harness.step()
    harness.step()
    rows = [[len(row.token_ids) for row in plan.rows] for plan in plans[num_before:]]
    assert rows == [[50 + num_common], [20 - num_common] * 4]
    harness.run()
    assert_alone(harness, "r", [5] * 50, **BEAMS)


def test_swapped_beams_share_on_the_host_and_when_they_are_back() -> None:
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=64, num_host_slots=64, max_num_seqs=8, preemption_mode="swap",
        enable_prefix_caching=False,
    )  # fmt: skip
    harness.add("r", [5] * 50, **BEAMS)
    for _ in range(20):
        harness.step()
    (request,) = harness.scheduler.roster.requests.values()
    held = {block for sequence in request.sequences for block in sequence.block_table}
    assert 6 < len(held) < 4 * 9
    harness.scheduler.roster.preempt(request.sequences[0])
    stats = harness.llm.stats()
    assert (stats.num_held_blocks, stats.num_pinned_host_slots, stats.num_swapped) == (0, len(held), 1)
    harness.scheduler.check_integrity()
    harness.step()
    stats = harness.llm.stats()
    assert (stats.num_swapped, stats.num_pinned_host_slots, stats.num_swapped_out_blocks) == (0, 0, len(held))
    assert (
        len(held) <= stats.num_swapped_in_blocks <= len(held) + 3
    )  # each reads his own of one that is shared and not full
    harness.run()
    assert_alone(harness, "r", [5] * 50, **BEAMS)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_step_that_fails_costs_no_beam(where: str, mode: str) -> None:
    harness = Harness(
        block_size=BLOCK, num_kv_blocks=26, num_host_slots=60, max_num_seqs=8, preemption_mode=mode,
        max_num_batched_tokens=12,
    )  # fmt: skip
    for index in range(3):
        harness.add(f"r{index}", [index] * 20, **BEAMS)
    num_steps = 0
    while harness.llm.has_unfinished():
        harness.runner.fail_next = where if num_steps % 7 == 3 else None
        harness.step()
        num_steps += 1
    for index in range(3):
        assert_alone(harness, f"r{index}", [index] * 20, **BEAMS)


@pytest.mark.parametrize("speculative", ["ngram", "suffix"])
def test_speculation_rests_for_beams_and_not_beside_them(speculative: str) -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=128, max_num_seqs=8, speculative=speculative)
    drafted: set[str] = set()
    execute = harness.runner.execute

    def note(plan: Plan) -> Any:
        drafted.update(row.sequence.request.request_id for row in plan.rows if row.num_proposals)
        return execute(plan)

    harness.runner.execute = note  # type: ignore[method-assign]
    prompt = [1, 2, 3, 4] * 8
    harness.add("beams", prompt, **BEAMS)
    harness.add("choice", [*alone(tuple(prompt), max_tokens=40, temperature=0.0).choices[0].token_ids, *prompt],
                max_tokens=40, temperature=0.0)  # fmt: skip
    harness.add("again", prompt, max_tokens=40, temperature=0.0)
    harness.run()
    assert drafted and "beams" not in drafted
    assert_alone(harness, "beams", prompt, **BEAMS)
    assert_alone(harness, "again", prompt, max_tokens=40, temperature=0.0)


def test_the_same_again_is_the_same() -> None:
    """Nothing about beams is drawn: another seed, another place in the queue, a warm cache."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_seqs=12)
    for seed in range(3):
        harness.add(f"r{seed}", [5] * 30, seed=seed, **BEAMS)
        harness.step()
    harness.run()
    assert harness.llm.stats().num_prefix_hit_tokens
    for seed in range(3):
        assert_alone(harness, f"r{seed}", [5] * 30, **BEAMS)


# ---- what is told


def test_nothing_is_told_before_the_end_and_then_everything_at_once() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    harness.add("r", [5] * 20, **BEAMS, logprobs=2, prompt_logprobs=1)
    harness.run()
    (delta,) = harness.deltas["r"]
    assert delta.finished and len(delta.deltas) == 4 and delta.prompt_logprobs is not None
    output = harness.output("r")
    assert output.timeline.decode_seconds > output.timeline.prefill_seconds
    scores = [choice.score for choice in output.choices]
    assert scores == sorted(scores, key=lambda score: -(score or 0.0))
    for choice in output.choices:
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        assert [each.chosen.token_id for each in choice.logprobs] == choice.token_ids


def test_the_best_of_a_wider_search() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    harness.add("wide", [5] * 20, **{**BEAMS, "n": 4})
    harness.add("best", [5] * 20, **{**BEAMS, "n": 2, "best_of": 4})
    harness.run()
    assert harness.output("best").choices == harness.output("wide").choices[:2]


def test_what_earlier_lives_emitted_is_refused() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    with pytest.raises(InvalidRequest, match="emitted: holds tokens"):
        harness.add("r", [5] * 20, **BEAMS, emitted=[[1], [], [], []])
    harness.add("r", [5] * 20, **BEAMS, emitted=[[], [], [], []])
    harness.run()


@pytest.mark.parametrize("num_steps", [0, 1, 10])
def test_an_abort_tells_the_end_of_every_choice(num_steps: int) -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    harness.add("r", [5] * 20, **BEAMS)
    for _ in range(num_steps):
        assert harness.step() == []
    delta = harness.llm.abort("r")
    assert delta is not None and delta.finished
    assert [(each.index, each.finish_reason, each.token_ids) for each in delta.deltas] == [
        (index, "abort", []) for index in range(4)
    ]
    invariants.nothing_is_held(harness.scheduler)


def test_a_beam_that_fails_ends_its_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_seqs=12)
    execute = harness.runner.execute

    def fail_one(plan: Plan) -> Any:
        result = execute(plan)
        if plan.step_index == 6:
            result.samples[2] = Sampled(None, error="not finite")
        return result

    monkeypatch.setattr(harness.runner, "execute", fail_one)
    harness.add("bad", [5] * 20, **BEAMS)
    harness.add("good", [6] * 20, **BEAMS)
    harness.run()
    assert [(choice.finish_reason, choice.error) for choice in harness.output("bad").choices] == [
        ("error", "not finite")
    ] * 4
    assert_alone(harness, "good", [6] * 20, **BEAMS)


# ---- what cannot be


def test_beams_that_cannot_run_together_are_refused_with_the_numbers() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=16, max_num_seqs=4)
    with pytest.raises(InvalidRequest, match="n: is 5 beams, and max_num_seqs lets 4 run together; lower it"):
        harness.add("r", [1], use_beam_search=True, n=5, max_tokens=2)
    with pytest.raises(InvalidRequest, match=r"n: is 4 beams, which after 20 prompt tokens may need 18 KV blocks of 8"):
        harness.add("r", [1] * 20, use_beam_search=True, n=4, max_tokens=29)
    harness.add("r", [1] * 20, use_beam_search=True, n=4, max_tokens=13)  # 2 + 4 * 2 blocks
    harness.run()


# ---- how they end


def test_stop_strings_end_beams_where_their_text_holds_them() -> None:
    """Each hypothesis ends with the token that completes a stop string, and its text before it."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    harness.add("r", [5] * 20, **{**BEAMS, "stop": ["e", "th"], "min_tokens": 4})
    harness.add("with", [5] * 20, **{**BEAMS, "stop": ["e", "th"], "min_tokens": 4, "include_stop_str_in_output": True})
    harness.run()
    choices, whole = harness.output("r").choices, harness.output("with").choices
    assert any(choice.finish_reason == "stop" for choice in choices)
    for choice, other in zip(choices, whole, strict=True):
        assert choice.token_ids == other.token_ids
        assert other.text == bytes(choice.token_ids).decode()
        if choice.finish_reason == "stop":
            assert choice.stop_reason in ("e", "th") and len(choice.token_ids) > 4
            assert other.text == choice.text + str(choice.stop_reason)
            assert "e" not in other.text[4:-1]


@pytest.mark.parametrize("include", [False, True])
def test_stop_tokens_are_no_text_unless_asked_for(include: bool) -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    stops = [ord("e"), ord("t"), ord("o")]
    harness.add("r", [5] * 20, **BEAMS, stop_token_ids=stops, include_stop_str_in_output=include)
    harness.run()
    for choice in harness.output("r").choices:
        assert choice.finish_reason == "stop" and choice.stop_reason == choice.token_ids[-1]
        assert choice.token_ids[-1] in stops and not set(choice.token_ids[:-1]) & set(stops)
        assert choice.text == bytes(choice.token_ids if include else choice.token_ids[:-1]).decode()


def test_the_context_ends_them_by_length() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_model_len=32)
    harness.add("r", [5] * 20, use_beam_search=True, n=3)
    harness.run()
    assert [(len(c.token_ids), c.finish_reason) for c in harness.output("r").choices] == [(12, "length")] * 3


def test_one_beam_is_greedy_with_an_end() -> None:
    config = EngineConfig(num_kv_blocks=64)
    assert SamplingParams(n=1, use_beam_search=True).validated().num_sequences == 1
    harness = Harness(block_size=BLOCK, num_kv_blocks=config.num_kv_blocks, preemption_mode="recompute")
    harness.add("r", [5] * 20, **{**BEAMS, "n": 1})
    for _ in range(10):
        harness.step()
    (request,) = harness.scheduler.roster.requests.values()
    harness.scheduler.roster.preempt(request.sequences[0])
    harness.run()
    assert_alone(harness, "r", [5] * 20, **{**BEAMS, "n": 1})
