"""Random schedules: arrivals, aborts, forks, beams, tiny pools, swaps, failing steps; invariants hold throughout."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine.errors import InvalidRequest
from tests.engine import invariants
from tests.engine.engine_harness import WALL_TIME, Harness, alone

MAX_LEN = 120

configs = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([8, 16]),
        "num_kv_blocks": st.integers(4, 30),
        "num_host_slots": st.sampled_from([0, 1, 6, 40]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 60),
        "preemption_mode": st.sampled_from(["auto", "recompute", "swap"]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "deadline", "fair"]),
        "enable_prefix_caching": st.booleans(),
        "enable_host_prefix_cache": st.booleans(),
        "max_step_seconds": st.sampled_from([None, 0.05]),
        "speculative": st.sampled_from(["none", "ngram", "suffix", "draft"]),
        "num_speculative_tokens": st.integers(1, 6),
        "speculative_adaptive": st.booleans(),
        "fake_acceptance": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "overlap_scheduling": st.sampled_from(["off", "on"]),
    }
)
requests = st.fixed_dictionaries(
    {
        "family": st.integers(0, 2),  # prompts of a family share their beginning
        "num_shared": st.integers(0, 40),
        "num_own": st.integers(1, 30),
        "kind": st.sampled_from(["choices", "choices", "beams", "best of"]),
        "n": st.sampled_from([1, 1, 1, 2, 3, 5]),
        "length_penalty": st.sampled_from([1.0, 0.0, 2.0, -1.0]),  # of beams, as the next
        "early_stopping": st.sampled_from([False, True, "never"]),
        "max_tokens": st.integers(1, 40),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "stop": st.sampled_from([(), (), ("e",), ("st", "ta ")]),
        "stop_token_ids": st.sampled_from([(), (), (ord("o"), ord("t"), ord("7"))]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "logprobs": st.sampled_from([None, None, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "priority": st.integers(-2, 2),
        "deadline": st.sampled_from([None, WALL_TIME + 1, WALL_TIME + 100]),
        "tenant": st.sampled_from(["a", "b"]),
        "salt": st.sampled_from(["", "s"]),
        "num_emitted": st.sampled_from([None, None, 0, 1, 7, 1000]),
    }
)


def as_kind(request: dict[str, Any], num_emitted: int | None) -> int | None:
    """Leaves of the parameters what a request of its kind may have; returns how much it has emitted before."""
    kind = request.pop("kind")
    shape = {name: request.pop(name) for name in ("length_penalty", "early_stopping")}
    if kind == "choices":
        return num_emitted
    if kind == "beams":
        del request["temperature"]
        request |= {"use_beam_search": True, **shape}
    if kind == "best of" or request["seed"] == 3:  # some searches are wider than what they return
        request["best_of"] = request["n"] + 2
    if kind == "best of":
        request["temperature"] = 1.0
    return None


def as_lists(request: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in request.items()}


class Schedules(RuleBasedStateMachine):
    @initialize(config=configs)
    def start(self, config: dict[str, Any]) -> None:
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_num_seqs"])
        config["enable_host_prefix_cache"] &= config["enable_prefix_caching"] and config["num_host_slots"] > 0
        if config["speculative"] == "draft":
            config["speculative_model"] = "fake"
        self.harness = Harness(max_model_len=MAX_LEN, **config)
        self.max_len = self.harness.llm.info.max_model_len
        self.given: dict[str, tuple[Any, list[list[int]] | None]] = {}
        self.aborted: set[str] = set()

    @rule(request=requests)
    def add(self, request: dict[str, Any]) -> None:
        family, num_shared, num_own, num_emitted = (
            request.pop(name) for name in ("family", "num_shared", "num_own", "num_emitted")
        )
        request_id = f"r{len(self.given)}"
        own = [(17 * i + 31 * len(self.given)) % 251 for i in range(num_own)]
        prompt = [(7 * family + i) % 251 for i in range(num_shared)] + own
        where = {name: request.pop(name) for name in ("tenant", "salt")}
        request["min_tokens"] = min(request["min_tokens"], request["max_tokens"])
        num_emitted = as_kind(request, num_emitted)
        refusal = "prompt" if len(prompt) >= self.max_len else self.refusal_of_beams(request, len(prompt))
        if refusal is not None:
            with pytest.raises(InvalidRequest, match=refusal):
                self.harness.add(request_id, prompt, **as_lists(request))
            return
        expected = alone(tuple(prompt), max_model_len=self.max_len, **request)
        emitted = None
        if num_emitted is not None:  # choices stand at different places, some at their end
            emitted = [choice.token_ids[: num_emitted + 3 * choice.index] for choice in expected.choices]
        given = {**as_lists(request), **where, "emitted": emitted}
        self.harness.add(request_id, prompt, **given)
        self.given[request_id] = (expected, emitted)

    def refusal_of_beams(self, request: dict[str, Any], num_prompt: int) -> str | None:
        """The field that is refused of beams that cannot run together: no seats, or no room where they share least."""
        if "use_beam_search" not in request:
            return None
        width, size = request.get("best_of", request["n"]), self.harness.config.block_size
        num_computed = num_prompt + min(request["max_tokens"], self.max_len - num_prompt) - 1
        num_blocks = num_prompt // size + width * (-(-num_computed // size) - num_prompt // size)
        if width <= self.harness.config.max_num_seqs and num_blocks <= self.harness.runner.num_kv_blocks:
            return None
        return "best_of" if "best_of" in request else "^n:"

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: getattr(self, "given", None))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.given)))
        delta = self.harness.llm.abort(request_id)
        if delta is not None:
            assert delta.finished
            self.harness.take([delta])
            self.aborted.add(request_id)
        invariants.conservation(self.harness.scheduler)

    @rule(where=st.sampled_from(["before", "after"]))
    def fail_the_next_step(self, where: str) -> None:
        self.harness.runner.fail_next = where

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        num_tokens = sum(
            sum(len(c.token_ids) for c in expected.choices) + MAX_LEN for expected, _ in self.given.values()
        )
        self.harness.run(max_steps=20 * num_tokens + 100)
        invariants.nothing_is_held(self.harness.scheduler)
        assert sorted(self.harness.finished) == sorted(self.given)
        for request_id, (expected, emitted) in self.given.items():
            invariants.each_thing_told_once(self.harness.deltas[request_id])
            if request_id not in self.aborted and request_id in self.harness.collectors:
                invariants.outputs_equal_alone(self.harness.output(request_id), expected, emitted=emitted)


_quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def test_random_schedules() -> None:
    run_state_machine_as_test(
        Schedules, settings=settings(max_examples=60, stateful_step_count=30, derandomize=True, **_quiet)
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_random_schedules() -> None:
    run_state_machine_as_test(Schedules, settings=settings(max_examples=5000, stateful_step_count=60, **_quiet))
