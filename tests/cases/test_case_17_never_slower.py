"""vLLM #49548, #17984: speculation makes a full batch slower than none.

Kind: work that does not pay. By simulated costs, since seconds of a machine prove nothing: batches of 1 to 64 on a
device that computes the first tokens of a step for free and pays for those beyond, proposers that are right always,
sometimes and never, drafts that cost nothing and much. Siblings: a load that changes, short answers.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.config import LoadedModel
from engine.fake_runner import FakeRunner, load_fake
from engine.plan import Plan, StepResult

FREE_TOKENS = 16  # that a step of 20 ms computes without taking longer
SECONDS_PER_MORE = 0.00125


class Device(FakeRunner):
    """Costs of a step by its tokens, as a roof gives them; of a draft by depth, and by sequences that have it."""

    seconds = 0.0
    draft_seconds = 0.0
    draft_seconds_each = 0.0

    def execute(self, plan: Plan) -> StepResult:
        result = super().execute(plan)
        if plan.rows:
            depth = max(row.num_proposals for row in plan.rows)
            num_drafting = sum(row.num_proposals > 0 for row in plan.rows)
            result.draft_seconds = depth * (self.draft_seconds + num_drafting * self.draft_seconds_each)
            self.seconds += 0.02 + SECONDS_PER_MORE * max(0, plan.num_tokens - FREE_TOKENS) + result.draft_seconds
        return result


def seconds_of(
    batches: list[int], num_tokens: int, draft_seconds: float = 0.0, draft_seconds_each: float = 0.0, **changes: Any
) -> float:
    """Batches one after another, each run to its end, in one engine."""
    config = EngineConfig(num_kv_blocks=2048, max_num_batched_tokens=1024, enable_prefix_caching=False, **changes)
    loaded = load_fake(config)
    runner = Device(config)
    runner.draft_seconds, runner.draft_seconds_each = draft_seconds, draft_seconds_each
    model = LoadedModel(runner=runner, tokenizer=loaded.tokenizer, info=loaded.info)
    llm = LLM(model, config, clock=lambda: runner.seconds)
    for turn, batch in enumerate(batches):
        prompts = [[turn, index, *range(30)] for index in range(batch)]
        llm.generate(prompts, SamplingParams(max_tokens=num_tokens, seed=turn))
    return runner.seconds


DRAFT = {"speculative": "draft", "speculative_model": "fake"}


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("acceptance", "draft_seconds"), [(0.0, 0.002), (0.5, 0.004), (0.8, 0.001), (0.9, 0.03)])
def test_never_below_none(batch: int, acceptance: float, draft_seconds: float) -> None:
    none = seconds_of([batch], 150)
    speculating = seconds_of([batch], 150, draft_seconds, fake_acceptance=acceptance, **DRAFT)
    assert none / speculating >= 0.97


@pytest.mark.parametrize("batch", [1, 4, 16, 32, 64])
@pytest.mark.parametrize("each", [0.0005, 0.001, 0.002])
def test_a_draft_that_is_cheap_for_one_sequence_and_dear_for_many(batch: int, each: float) -> None:
    none = seconds_of([batch], 400)
    assert none / seconds_of([batch], 400, 0.001, each, fake_acceptance=0.95, **DRAFT) >= 0.97


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
def test_near_the_best_depth(batch: int) -> None:
    """Over a long run, 0.95 of the best fixed number of proposals, none included."""
    changes = {"fake_acceptance": 0.8, **DRAFT}
    fixed = [seconds_of([batch], 200)]
    for depth in (1, 2, 3, 5):
        always = {"speculative_adaptive": False, "num_speculative_tokens": depth}
        fixed.append(seconds_of([batch], 200, 0.002, **always, **changes))
    assert min(fixed) / seconds_of([batch], 200, 0.002, **changes) >= 0.95


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_proposers_that_are_hardly_ever_right_cost_nothing(proposer: str) -> None:
    """The fake model's text is noise: what is looked up in it is wrong."""
    for batches in ([1], [16], [64], [1, 32, 4, 64, 2]):
        assert seconds_of(batches, 80) / seconds_of(batches, 80, speculative=proposer) >= 0.97


def test_a_load_that_changes_and_short_answers() -> None:
    changes = {"fake_acceptance": 0.6, **DRAFT}
    for batches, num_tokens in (([1, 64, 2, 32, 1, 48], 60), ([8] * 12, 12), ([64] * 4, 5)):
        assert seconds_of(batches, num_tokens) / seconds_of(batches, num_tokens, 0.002, **changes) >= 0.97
