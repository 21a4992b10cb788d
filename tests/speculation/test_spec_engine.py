"""Speculation in the engine, over the fake model: rows, blocks, ends, figures; tokens never change."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.config import LoadedModel
from engine.errors import InvalidConfig
from engine.fake_runner import FakeRunner, load_fake
from engine.sequence import Sequence
from tests.engine import invariants
from tests.engine.engine_harness import Harness, alone

DRAFT: dict[str, Any] = {"speculative": "draft", "speculative_model": "fake"}
PROPOSERS: list[dict[str, Any]] = [
    {"speculative": "ngram", "speculative_model": None},
    {"speculative": "suffix", "speculative_model": None},
    DRAFT,
]


def always(**changes: Any) -> Harness:
    """An engine that verifies all that is proposed."""
    return Harness(**{"num_kv_blocks": 64, "speculative_adaptive": False, **DRAFT, **changes})


def assert_as_alone(harness: Harness, request_id: str, prompt: list[int], **params: Any) -> None:
    given = {**params, "stop": tuple(params.get("stop", ()))}
    max_model_len = harness.llm.info.max_model_len
    invariants.outputs_equal_alone(
        harness.output(request_id), alone(tuple(prompt), max_model_len=max_model_len, **given)
    )


def test_a_draft_that_is_always_right_gives_one_token_more_than_it_proposes_each_step() -> None:
    harness = always(num_speculative_tokens=4, fake_acceptance=1.0)
    harness.add("a", [1, 2, 3], max_tokens=21, seed=1)
    harness.run()
    stats = harness.llm.stats()
    assert stats.num_steps == 5  # the prompt gives one, and 20 come by fives
    assert (stats.num_drafted_tokens, stats.num_accepted_tokens, stats.tokens_per_verification) == (16, 16, 5.0)
    assert stats.acceptance_by_position == (1.0, 1.0, 1.0, 1.0)
    assert_as_alone(harness, "a", [1, 2, 3], max_tokens=21, seed=1)


def test_a_draft_that_is_always_wrong_gives_one_token_each_step_and_keeps_no_block() -> None:
    harness = always(num_speculative_tokens=6, fake_acceptance=0.0, block_size=8)
    harness.add("a", [1, 2, 3], max_tokens=20, seed=1)
    while harness.llm.has_unfinished():
        harness.step()
        for sequence in harness.scheduler.roster.running:
            assert len(sequence.block_table) == -(-(sequence.num_computed_tokens + 1) // 8), "a rejected tail is held"
    stats = harness.llm.stats()
    assert (stats.num_steps, stats.num_accepted_tokens, stats.tokens_per_verification) == (20, 0, 1.0)
    assert_as_alone(harness, "a", [1, 2, 3], max_tokens=20, seed=1)


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("num_proposals", [1, 3, 8])
def test_everything_beside_everything(proposer: dict[str, Any], num_proposals: int) -> None:
    """n, seeds, stops, least lengths, logprobs, salts, a small pool with swap, chunks, emitted tokens."""
    harness = always(num_speculative_tokens=num_proposals, block_size=8, num_kv_blocks=14, num_host_slots=12,
                     max_num_batched_tokens=30, max_num_seqs=6, fake_acceptance=0.8, **proposer)  # fmt: skip
    asks = [
        {
            "n": n,
            "temperature": temperature,
            "seed": seed,
            "max_tokens": 30,
            "stop": stop,
            "min_tokens": 3,
            "logprobs": 2,
        }
        for seed, (n, temperature, stop) in enumerate(
            [(1, 0.0, []), (3, 1.0, ["e"]), (1, 1.0, ["th", "a "]), (2, 0.0, ["st"]), (1, 0.5, [])]
        )
    ]
    for index, ask in enumerate(asks):
        harness.add(str(index), [7, 8, 9] * 5 + [index], **ask)
    harness.run()
    stats = harness.llm.stats()
    assert stats.num_drafted_tokens > 0
    assert stats.num_preempted_recompute + stats.num_preempted_swap > 0
    for index, ask in enumerate(asks):
        assert_as_alone(harness, str(index), [7, 8, 9] * 5 + [index], **ask)
    invariants.nothing_is_held(harness.scheduler)


def test_end_of_sequence_inside_accepted_tokens_ends_there() -> None:
    config = EngineConfig(fake_eos_every=9, num_kv_blocks=64)
    expected = LLM(load_fake(config), config).generate([[1, 2, 3]], SamplingParams(max_tokens=200, seed=4))[0]
    assert 5 < len(expected.choices[0].token_ids) < 60
    for num_proposals in (3, 7, 40):
        harness = always(fake_eos_every=9, num_speculative_tokens=num_proposals, fake_acceptance=1.0)
        harness.add("a", [1, 2, 3], max_tokens=200, seed=4)
        harness.run()
        invariants.outputs_equal_alone(harness.output("a"), expected)


@pytest.mark.parametrize("place", range(12))
def test_a_stop_string_inside_accepted_tokens_ends_there_whatever_ends_behind_it(place: int) -> None:
    """Behind the stop string lie more accepted tokens, the end of sequence, the least length or the most."""
    for script, max_tokens in ((b"abcdefghijkl" + b"\0" * 9, 40), (b"abcdefghijkl", 14)):
        tokens = [256 if byte == 0 else byte for byte in script]  # 256: end of sequence
        stop = chr(ord("a") + place)
        llm = scripted(tokens, num_speculative_tokens=40)
        output = llm.generate([[65]], SamplingParams(max_tokens=max_tokens, stop=[stop], temperature=0))[0].choices[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("abcdefghijkl"[:place], "stop", stop)
        assert output.token_ids == tokens[: place + 1]
        llm.check_integrity()
        assert llm.stats().num_generated_tokens == place + 1


class Scripted(FakeRunner):
    script: list[int]

    def _token(self, sequence: Sequence, digest: int) -> int:
        return self.script[sequence.num_output_tokens % len(self.script)]


def scripted(script: list[int], **changes: Any) -> LLM:
    """Writes the script; its draft always knows."""
    config = EngineConfig(**{**DRAFT, "speculative_adaptive": False, "fake_acceptance": 1.0, **changes})
    loaded = load_fake(config)
    runner = Scripted(config, verify_kv=True)
    runner.script = script
    return LLM(LoadedModel(runner=runner, tokenizer=loaded.tokenizer, info=loaded.info), config)


def test_a_draw_that_fails_counts_only_where_it_is_reached() -> None:
    """The target fails at output 6 alone: tokens before it are told, and then the error."""

    class Failing(FakeRunner):
        def _draw(self, sequence: Sequence, digest: int) -> Any:
            found = super()._draw(sequence, digest)
            if sequence.num_output_tokens == 6:
                found.token_id, found.error = None, "no"
            return found

    for num_proposals in (2, 5, 9):
        config = EngineConfig(
            **DRAFT, speculative_adaptive=False, fake_acceptance=1.0, num_speculative_tokens=num_proposals
        )
        loaded = load_fake(config)
        llm = LLM(LoadedModel(runner=Failing(config), tokenizer=loaded.tokenizer, info=loaded.info), config)
        choice = llm.generate([[1, 2]], SamplingParams(max_tokens=20))[0].choices[0]
        assert (len(choice.token_ids), choice.finish_reason, choice.error) == (6, "error", "no")
        invariants.nothing_is_held(llm._scheduler)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_failed_step_is_computed_again(where: str) -> None:
    harness = always(num_speculative_tokens=3, fake_acceptance=0.7)
    for index in range(4):
        harness.add(str(index), [1, 2, index], max_tokens=20, seed=index)
    for _ in range(3):
        harness.step()
        harness.runner.fail_next = where
        harness.step()
    harness.run()
    for index in range(4):
        assert_as_alone(harness, str(index), [1, 2, index], max_tokens=20, seed=index)


def test_only_rows_that_fail_by_themselves_end() -> None:
    class Failing(FakeRunner):
        def execute(self, plan: Any) -> Any:
            if any(row.sequence.request.request_id == "bad" and row.num_proposals for row in plan.rows):
                raise RuntimeError("broken")
            return super().execute(plan)

    config = EngineConfig(**DRAFT, speculative_adaptive=False, num_kv_blocks=64)
    loaded = load_fake(config)
    llm = LLM(LoadedModel(runner=Failing(config), tokenizer=loaded.tokenizer, info=loaded.info), config)
    found = {}
    for name in ("a", "bad", "c"):
        llm.add_request(name, [1, 2, 3], SamplingParams(max_tokens=9, seed=1))
    while llm.has_unfinished():
        for delta in llm.step():
            found[delta.request_id] = delta.deltas[0].finish_reason or found.get(delta.request_id)
    assert found == {"a": "length", "bad": "error", "c": "length"}
    invariants.nothing_is_held(llm._scheduler)


def test_an_interrupted_step_leaves_no_proposals_behind() -> None:
    class Interrupted(FakeRunner):
        is_armed = False

        def execute(self, plan: Any) -> Any:
            if self.is_armed and any(row.num_proposals for row in plan.rows):
                self.is_armed = False
                raise KeyboardInterrupt
            return super().execute(plan)

    config = EngineConfig(**DRAFT, speculative_adaptive=False, num_kv_blocks=64, fake_acceptance=0.5)
    loaded = load_fake(config)
    runner = Interrupted(config, verify_kv=True)
    llm = LLM(LoadedModel(runner=runner, tokenizer=loaded.tokenizer, info=loaded.info), config)
    llm.add_request("a", [1, 2, 3], SamplingParams(max_tokens=12, seed=1))
    tokens: list[int] = []
    for step in range(40):
        runner.is_armed = step in (1, 3, 4)
        try:
            for delta in llm.step():
                tokens += delta.deltas[0].token_ids
        except KeyboardInterrupt:
            llm.check_integrity()
    assert tokens == alone((1, 2, 3), max_tokens=12, seed=1).choices[0].token_ids


def test_prefill_goes_on_beside_proposals_that_would_fill_the_budget() -> None:
    harness = always(max_num_batched_tokens=16, max_num_seqs=4, num_speculative_tokens=15, fake_acceptance=0.0,
                     max_step_seconds=0.02)  # fmt: skip
    for index in range(3):
        harness.add(str(index), [index], max_tokens=60)
    harness.step()
    harness.add("long", list(range(60)), max_tokens=1)
    for _ in range(12):
        harness.step()
    assert "long" in harness.finished


def test_proposals_preempt_nobody_and_take_no_block_that_a_start_needs() -> None:
    """A pool that holds both requests to their ends, but not their rejected tails beside them."""
    harness = always(block_size=8, num_kv_blocks=6, num_speculative_tokens=8, fake_acceptance=0.0,
                     enable_prefix_caching=False)  # fmt: skip
    for name in ("a", "b"):
        harness.add(name, [1] * 8, max_tokens=17, seed=1)
    harness.run()
    stats = harness.llm.stats()
    assert stats.num_preempted_recompute + stats.num_preempted_swap == 0
    assert stats.num_steps == 17
    assert stats.num_drafted_tokens > 0


def test_figures_of_a_request_are_in_its_timeline() -> None:
    harness = always(num_speculative_tokens=4, fake_acceptance=1.0)
    harness.add("a", [1, 2, 3], max_tokens=11)
    harness.add("b", [1, 2, 3], max_tokens=1)
    harness.run()
    timeline = harness.output("a").timeline
    assert (timeline.num_drafted_tokens, timeline.num_accepted_tokens) == (8, 8)
    timeline = harness.output("b").timeline
    assert (timeline.num_drafted_tokens, timeline.num_accepted_tokens) == (0, 0)


def simulated(**changes: Any) -> tuple[LLM, list[float]]:
    """A clock that only the model's costs move: target 50 ms, a draft 2 ms."""
    passed = [0.0]
    config = EngineConfig(**{**DRAFT, "num_speculative_tokens": 5, "fake_seconds_per_step": 0.05,
                             "fake_seconds_per_draft": 0.002, **changes})  # fmt: skip

    def sleep(seconds: float) -> None:
        passed[0] += seconds

    return LLM(load_fake(config, sleep=sleep), config, clock=lambda: passed[0]), passed


def seconds_for(num_tokens: int, **changes: Any) -> float:
    llm, passed = simulated(**changes)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=num_tokens, seed=1))
    return passed[0]


def test_costs_of_2_and_50_ms_at_acceptance_70_percent_give_two_and_a_half_times_the_speed() -> None:
    plain = seconds_for(3000, speculative="none", speculative_model=None)
    assert plain / seconds_for(3000, speculative_adaptive=False) == pytest.approx(2.45, abs=0.1)
    assert plain / seconds_for(3000) > 2.3


@pytest.mark.parametrize(
    ("acceptance", "seconds_per_draft"), [(0.0, 0.002), (0.0, 0.05), (0.05, 0.02), (0.5, 0.05), (0.9, 0.06)]
)
def test_adaptive_speculation_that_cannot_pay_costs_almost_nothing(acceptance: float, seconds_per_draft: float) -> None:
    changes = {"fake_acceptance": acceptance, "fake_seconds_per_draft": seconds_per_draft}
    plain = seconds_for(1500, speculative="none", speculative_model=None)
    assert plain / seconds_for(1500, **changes) > 0.97


@pytest.mark.parametrize(
    ("field", "value"),
    [("speculative", "guess"), ("speculative_model", "x"), ("num_speculative_tokens", 0), ("fake_acceptance", 2.0)],
)
def test_bad_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=field):
        EngineConfig(**{field: value})


def test_a_draft_needs_a_model() -> None:
    with pytest.raises(InvalidConfig, match="speculative_model"):
        EngineConfig(speculative="draft")
