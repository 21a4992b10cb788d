"""best_of: more candidates are drawn than come back, and the likeliest of them do, at the end."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import Plan, Sampled
from tests.engine import invariants
from tests.engine.engine_harness import Harness, alone

PROMPT = list(range(20))


def test_the_likeliest_of_the_candidates_are_the_choices() -> None:
    """The candidates are the choices that n = best_of draws; the mean logprob of a token ranks them."""
    params: dict[str, Any] = {"max_tokens": 30, "seed": 3, "stop": ("e",), "logprobs": 2}
    every = alone(tuple(PROMPT), n=8, **params).choices
    harness = Harness(block_size=8, num_kv_blocks=128)
    harness.add("r", PROMPT, n=3, best_of=8, **{**params, "stop": ["e"]})
    harness.run()
    means = {choice.index: (choice.cumulative_logprob or 0.0) / len(choice.token_ids) for choice in every}
    best = sorted(means, key=lambda index: (-means[index], index))[:3]
    choices = harness.output("r").choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({len(choice.token_ids) for choice in every}) > 2
    for choice, index in zip(choices, best, strict=True):
        expected = every[index]
        assert (choice.token_ids, choice.text, choice.logprobs) == (
            expected.token_ids,
            expected.text,
            expected.logprobs,
        )
        assert (choice.finish_reason, choice.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert choice.score == pytest.approx(means[index])
        assert choice.cumulative_logprob == pytest.approx(expected.cumulative_logprob)


def test_nothing_is_told_before_the_end_and_no_logprobs_unasked() -> None:
    harness = Harness(block_size=8, num_kv_blocks=128)
    harness.add("r", PROMPT, n=2, best_of=4, max_tokens=10, seed=1)
    harness.run()
    (delta,) = harness.deltas["r"]
    assert delta.finished and [each.index for each in delta.deltas] == [0, 1]
    for choice in harness.output("r").choices:
        assert choice.logprobs is None and choice.score is not None
    assert harness.llm.stats().num_generated_tokens == 4 * 10


def test_a_candidate_that_fails_is_behind_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(block_size=8, num_kv_blocks=128)
    execute = harness.runner.execute

    def fail_two(plan: Plan) -> Any:
        result = execute(plan)
        if plan.step_index == 4:
            result.samples[0] = result.samples[1] = Sampled(None, error="not finite")
        return result

    monkeypatch.setattr(harness.runner, "execute", fail_two)
    harness.add("r", PROMPT, n=2, best_of=3, max_tokens=10, seed=1)
    harness.run()
    first, second = harness.output("r").choices
    assert first.finish_reason == "length" and len(first.token_ids) == 10
    assert (second.finish_reason, second.error, second.score) == ("error", "not finite", None)


def test_an_abort_tells_the_end_of_every_choice() -> None:
    harness = Harness(block_size=8, num_kv_blocks=128)
    harness.add("r", PROMPT, n=2, best_of=4, max_tokens=10, seed=1)
    for _ in range(5):
        assert harness.step() == []
    delta = harness.llm.abort("r")
    assert delta is not None and delta.finished
    assert [(each.index, each.finish_reason, each.token_ids, each.text) for each in delta.deltas] == [
        (0, "abort", [], ""), (1, "abort", [], ""),
    ]  # fmt: skip
    invariants.nothing_is_held(harness.scheduler)
