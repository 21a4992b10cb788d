"""Steps that overlap: the next one is launched before the tokens of this one are known, and no token changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.config import LoadedModel
from engine.errors import DeviceFailed
from engine.fake_runner import FakeRunner, load_fake
from engine.launcher import HostLauncher
from engine.plan import Plan, StepResult
from tests.engine import invariants
from tests.engine.engine_harness import Harness, alone

SETTINGS: dict[str, Any] = {"num_kv_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 64}


def harness_of(**config: Any) -> Harness:
    return Harness(**{**SETTINGS, "overlap_scheduling": "on", **config})


def num_ahead(llm: LLM) -> int:
    return llm._pipeline.num_ahead


def test_decodes_are_launched_before_their_tokens_are_known() -> None:
    harness = harness_of()
    for index in range(3):
        harness.add(f"r{index}", list(range(index, index + 20)), max_tokens=30, temperature=1.0, seed=index)
    harness.run()
    for index in range(3):
        prompt = tuple(range(index, index + 20))
        expected = alone(prompt, max_tokens=30, temperature=1.0, seed=index)
        invariants.outputs_equal_alone(harness.output(f"r{index}"), expected)
    assert num_ahead(harness.llm) > 20  # of about 30 steps
    invariants.nothing_is_held(harness.scheduler)


def test_off_by_default_where_the_runner_gains_nothing() -> None:
    llm = LLM(load_fake(EngineConfig()), EngineConfig())
    llm.generate("abc", SamplingParams(max_tokens=10, temperature=0.0))
    assert num_ahead(llm) == 0


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"bad_words": ["zq"]},
        {"min_tokens": 12},
        {"use_beam_search": True, "n": 2, "temperature": None, "seed": None},
    ],
)
def test_a_draw_that_needs_the_last_token_waits_for_it(params: dict[str, Any]) -> None:
    harness = harness_of()
    given = {name: value for name, value in {"temperature": 1.0, "seed": 1, **params}.items() if value is not None}
    harness.add("r", list(range(20)), max_tokens=12, **given)
    harness.run()
    assert num_ahead(harness.llm) == 0
    expected = alone(
        tuple(range(20)), max_tokens=12, **{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    )
    invariants.outputs_equal_alone(harness.output("r"), expected)


def test_an_abort_takes_effect_within_two_steps_and_harms_nobody() -> None:
    harness = harness_of()
    for name in ("goes", "stays"):
        harness.add(name, [ord(name[0])] * 20, max_tokens=40, temperature=1.0, seed=1)
    for _ in range(8):
        harness.step()
    assert num_ahead(harness.llm) > 2
    last = harness.llm.abort("goes")
    assert last is not None and last.finished
    invariants.conservation(harness.scheduler)
    harness.runner.plans = []
    executed: list[Plan] = []
    execute = harness.runner.execute
    harness.runner.execute = lambda plan: (executed.append(plan), execute(plan))[1]  # type: ignore[method-assign]
    harness.run()
    with_it = [plan for plan in executed if any(row.sequence.request.request_id == "goes" for row in plan.rows)]
    assert len(with_it) <= 1
    invariants.outputs_equal_alone(
        harness.output("stays"), alone(tuple([ord("s")] * 20), max_tokens=40, temperature=1.0, seed=1)
    )


def test_all_aborted_and_a_new_request_begins_afresh() -> None:
    harness = harness_of()
    harness.add("goes", [1] * 20, max_tokens=40)
    for _ in range(6):
        harness.step()
    harness.llm.abort("goes")
    assert not harness.llm.has_unfinished()
    assert harness.step() == []
    harness.add("comes", [2] * 20, max_tokens=10, temperature=0.0)
    harness.run()
    invariants.outputs_equal_alone(harness.output("comes"), alone(tuple([2] * 20), max_tokens=10, temperature=0.0))


def test_whoever_waits_starts_though_steps_run_ahead() -> None:
    """Two seats, five requests: a seat that becomes free is taken, two steps later at most."""
    harness = harness_of(max_num_seqs=2)
    for index in range(5):
        harness.add(f"r{index}", [index] * 10, max_tokens=8 + index, temperature=0.0)
    harness.run(max_steps=60)
    assert sorted(harness.finished) == [f"r{index}" for index in range(5)]
    assert num_ahead(harness.llm) > 5
    for index in range(5):
        invariants.outputs_equal_alone(
            harness.output(f"r{index}"), alone(tuple([index] * 10), max_tokens=8 + index, temperature=0.0)
        )


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_step_that_fails_takes_the_next_one_with_it(where: str) -> None:
    harness = harness_of()
    for index in range(3):
        harness.add(f"r{index}", [index] * 12, max_tokens=20, temperature=1.0, seed=index)
    for step in range(30):
        if step in (5, 6, 11):
            harness.runner.fail_next = where
        harness.step()
    harness.run()
    assert harness.runner.num_failures == 3
    for index in range(3):
        invariants.outputs_equal_alone(
            harness.output(f"r{index}"), alone(tuple([index] * 12), max_tokens=20, temperature=1.0, seed=index)
        )
    invariants.nothing_is_held(harness.scheduler)


def test_a_broken_device_is_told_and_nothing_is_under_way_any_more() -> None:
    class Breaks(FakeRunner):
        def execute(self, plan: Plan) -> StepResult:
            if plan.step_index > 6:
                raise DeviceFailed("gone")
            return super().execute(plan)

    config = EngineConfig(**SETTINGS, overlap_scheduling="on")
    loaded = load_fake(config)
    llm = LLM(LoadedModel(runner=Breaks(config), tokenizer=loaded.tokenizer, info=loaded.info), config)
    llm.add_request("r", [1] * 10, SamplingParams(max_tokens=30))
    with pytest.raises(DeviceFailed):
        while llm.has_unfinished():
            llm.step()
    llm.check_integrity()


def test_blocks_fill_and_prefixes_are_cached_as_without() -> None:
    """Blocks of 8 fill again and again while steps run ahead; what they hold is found by the next request."""
    cached = []
    for overlap in ("on", "off"):
        harness = harness_of(block_size=8, overlap_scheduling=overlap)
        harness.add("first", [7] * 9, max_tokens=40, ignore_eos=True, temperature=0.0)
        harness.run()
        tokens = harness.output("first").choices[0].token_ids
        harness.add("second", [7] * 9 + tokens, max_tokens=4)
        harness.run()
        cached.append(harness.output("second").num_cached_tokens)
    assert cached[0] == cached[1] > 40


def test_the_real_runner_s_tokens_are_the_same(load_tiny: Callable[..., LoadedModel]) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, max_tokens=25, ignore_eos=True, n=2, logprobs=1),
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=15, ignore_eos=True),
    ]
    prompts = [list(range(5, 40)), [9, 8, 7], list(range(60, 90))]
    outputs = []
    for overlap in ("on", "off"):
        loaded = load_tiny(num_kv_blocks=40)
        llm = LLM(loaded, EngineConfig(num_kv_blocks=40, overlap_scheduling=overlap))
        outputs.append([output.choices for output in llm.generate([*prompts], [*params])])
        assert (num_ahead(llm) > 10) is (overlap == "on")
    assert outputs[0] == outputs[1]


def test_a_step_that_follows_a_failed_one_fails(load_tiny: Callable[..., LoadedModel]) -> None:
    from engine.plan import Row
    from engine.sequence import Request, Sequence

    launcher = HostLauncher(load_tiny().runner)
    sequence = Sequence(Request("r", [5], SamplingParams(temperature=0.0), seed=0), 0, 0)
    alone_row = Row(sequence, 0, [5], [0], 1, [sequence])
    following = Row(sequence, 1, [0], [0], 1, [sequence], follows=0)
    first = launcher.launch(Plan(1, [alone_row], 1)).result().samples[0].token_id
    assert launcher.launch(Plan(2, [following], 1)).result().samples[0].token_id is not None
    assert following.token_ids == [0] and first is not None
    launcher.launch(Plan(3, [Row(sequence, 0, [5], [], 1, [sequence])], 1))  # a row without a block
    with pytest.raises(RuntimeError, match="follows one that failed"):
        launcher.launch(Plan(4, [following], 1)).result()
