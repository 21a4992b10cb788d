"""The engine's face over the fake model: text, ends, logprobs, seeds, continuation, isolation, numbers."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from typing import Any

import pytest

from engine import LLM, EngineConfig, InvalidRequest, SamplingParams
from engine.config import LoadedModel
from engine.errors import DeviceFailed, InvalidConfig
from engine.fake_runner import EOS, FakeRunner, load_fake
from engine.isolation import MAX_FAILURES_IN_A_ROW
from engine.outputs import RequestDelta
from engine.plan import Plan, Sampled, StepResult
from tests.engine import invariants
from tests.engine.engine_harness import Harness, alone


def make(runner_type: type[FakeRunner] = FakeRunner, **settings: Any) -> LLM:
    config = EngineConfig(**{"num_kv_blocks": 128, **settings})
    loaded = load_fake(config)
    return LLM(
        LoadedModel(runner=runner_type(config, verify_kv=True), tokenizer=loaded.tokenizer, info=loaded.info), config
    )


def run(llm: LLM) -> dict[str, list[RequestDelta]]:
    told: dict[str, list[RequestDelta]] = {}
    while llm.has_unfinished():
        for delta in llm.step():
            told.setdefault(delta.request_id, []).append(delta)
    return told


# ---- generate


def test_outputs_come_in_order_with_everything_filled_in() -> None:
    llm = make()
    prompts = ["text", {"prompt": "more text"}, {"prompt_token_ids": [1, 2, 3]}, [4, 5]]
    outputs = llm.generate(prompts, SamplingParams(n=2, seed=1, max_tokens=6, logprobs=2))
    assert [output.num_prompt_tokens for output in outputs] == [4, 9, 3, 2]
    assert outputs[2].prompt_token_ids == [1, 2, 3]
    for output in outputs:
        assert [choice.index for choice in output.choices] == [0, 1]
        for choice in output.choices:
            assert len(choice.token_ids) == 6 and choice.finish_reason == "length"
            assert choice.text == llm.tokenizer.decode(choice.token_ids)
            assert choice.logprobs is not None
            assert choice.cumulative_logprob == pytest.approx(sum(p.chosen.logprob for p in choice.logprobs))
        assert output.timeline.decode_seconds > 0 and output.num_cached_tokens == 0
    llm.check_integrity()


def test_each_prompt_may_have_parameters_of_its_own() -> None:
    outputs = make().generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, n=3)])
    assert [len(output.choices) for output in outputs] == [1, 3]
    with pytest.raises(InvalidRequest, match="params: 1 are given for 2 prompts"):
        make().generate(["a", "b"], [SamplingParams()])


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([""], "prompt: is empty"), ([[]], "prompt: is empty"), ([[-1]], "holds token -1"), ([[260]], "token 260"),
        ([[1.5]], "holds 1.5"), ([[True]], "holds True"), ([None], "is NoneType"), ([{"text": "a"}], "a mapping holds"),
        (["\ud83d"], "surrogate"), ([1, 2], "token ids are written"), ([b"ab"], "is bytes"), ([3], "token ids are"),
    ],
)  # fmt: skip
def test_a_bad_prompt_is_refused_and_nothing_is_left_queued(prompts: Any, match: str) -> None:
    llm = make()
    with pytest.raises(InvalidRequest, match=match):
        llm.generate(["good", *prompts] if not isinstance(prompts[0], int) else prompts, SamplingParams(max_tokens=2))
    assert not llm.has_unfinished()
    llm.check_integrity()
    assert llm.generate("good", SamplingParams(max_tokens=2))[0].choices[0].finish_reason == "length"


def test_parameters_are_checked_against_the_model() -> None:
    llm = make()
    for params in (SamplingParams(logit_bias={260: 1}), SamplingParams(stop_token_ids=[260]), SamplingParams(n=0)):
        with pytest.raises(InvalidRequest):
            llm.generate("a", params)
    assert not llm.has_unfinished()


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"), [(31, 1, 1), (31, None, 1), (31, 9, 1), (30, 9, 2), (29, 2, 2)]
)
def test_the_context_bounds_every_request(num_prompt: int, max_tokens: int | None, expected: int) -> None:
    """Case 21: L-1 yields one token and `length`."""
    llm = make(max_model_len=32)
    choice = llm.generate([[1] * num_prompt], SamplingParams(max_tokens=max_tokens))[0].choices[0]
    assert (len(choice.token_ids), choice.finish_reason) == (expected, "length")
    for too_long in (32, 33):
        with pytest.raises(InvalidRequest, match="prompt: "):
            llm.generate([[1] * too_long], SamplingParams(max_tokens=max_tokens))


def test_generate_needs_an_idle_engine() -> None:
    llm = make()
    llm.add_request("r", "a", SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="without other requests"):
        llm.generate("b")
    run(llm)


def test_no_prompts_give_no_outputs() -> None:
    assert make().generate([]) == []


# ---- exactness


def test_a_request_gives_the_same_whatever_runs_beside_it() -> None:
    for params in ({"temperature": 0.0}, {"seed": 7, "n": 2}, {"seed": 8, "temperature": 0.5}):
        harness = Harness(block_size=8, num_kv_blocks=40, max_num_seqs=5, max_num_batched_tokens=20)
        for index in range(6):
            harness.add(f"noise{index}", [index] * (7 + 3 * index), max_tokens=25, seed=index)
            harness.step()
        harness.add("r", "what does it depend on?", max_tokens=30, **params)
        harness.run()
        expected = alone("what does it depend on?", max_tokens=30, **params)
        invariants.outputs_equal_alone(harness.output("r"), expected)


def test_seeds_decide_and_choices_differ() -> None:
    """Case 12: seed 42 three times, then 43."""
    llm = make()
    outputs = llm.generate(["p"] * 4, [SamplingParams(seed=s, max_tokens=20) for s in (42, 42, 42, 43)])
    tokens = [output.choices[0].token_ids for output in outputs]
    assert tokens[0] == tokens[1] == tokens[2] != tokens[3]
    choices = llm.generate("p", SamplingParams(seed=42, n=3, max_tokens=20))[0].choices
    assert len({tuple(choice.token_ids) for choice in choices}) == 3 and choices[0].token_ids == tokens[0]


def test_an_unseeded_request_has_a_seed_that_reproduces_it() -> None:
    llm = make()
    llm.add_request("r", "p", SamplingParams(max_tokens=20))
    seed = llm._streams["r"].request.params.seed
    assert seed is not None
    tokens = [token for delta in run(llm)["r"] for choice in delta.deltas for token in choice.token_ids]
    assert llm.generate("p", SamplingParams(seed=seed, max_tokens=20))[0].choices[0].token_ids == tokens
    assert len({tuple(llm.generate("p", SamplingParams(max_tokens=20))[0].choices[0].token_ids) for _ in range(3)}) == 3


def test_seeds_are_used_modulo_two_to_the_64() -> None:
    llm = make()
    outputs = llm.generate(["p"] * 2, [SamplingParams(seed=s, max_tokens=8) for s in (-1, 2**64 - 1)])
    assert outputs[0].choices == outputs[1].choices


# ---- ends


def test_joined_deltas_are_the_whole_text() -> None:
    llm = make()
    llm.add_request("r", "tell", SamplingParams(n=3, seed=1, max_tokens=40, stop=["ee", "t h"]))
    told = run(llm)["r"]
    invariants.each_thing_told_once(told)
    whole = make().generate("tell", SamplingParams(n=3, seed=1, max_tokens=40, stop=["ee", "t h"]))[0]
    for choice in whole.choices:
        parts = [delta for step in told for delta in step.deltas if delta.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
    assert told[-1].timeline is not None and all(step.timeline is None for step in told[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_choice_and_is_not_said(include: bool) -> None:
    """Case 29: stops that start and end inside tokens: no stop byte is emitted."""
    free = make().generate("tell", SamplingParams(seed=1, max_tokens=60))[0].choices[0].text
    stop = free[20:24]
    params = SamplingParams(seed=1, max_tokens=60, stop=[stop], include_stop_str_in_output=include)
    llm = make()
    choice = llm.generate("tell", params)[0].choices[0]
    end = free.index(stop)
    assert choice.text == free[: end + (len(stop) if include else 0)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert llm.tokenizer.decode(choice.token_ids) == free[: end + len(stop)]
    assert llm.stats().num_held_blocks == 0 and llm.stats().num_requests == 0


def test_a_stop_string_on_the_last_token_outweighs_the_length() -> None:
    free = make().generate("tell", SamplingParams(seed=1, max_tokens=10))[0].choices[0].text
    stop = free[-2:]
    assert stop not in free[:-1]
    choice = make().generate("tell", SamplingParams(seed=1, max_tokens=10, stop=[stop]))[0].choices[0]
    assert (choice.finish_reason, choice.stop_reason, choice.text) == ("stop", stop, free[:-2])


def test_stop_tokens_end_a_choice_and_are_no_text() -> None:
    free = make().generate("tell", SamplingParams(seed=1, max_tokens=60))[0].choices[0]
    token_id = free.token_ids[10]
    end = free.token_ids.index(token_id)
    for include in (False, True):
        params = SamplingParams(seed=1, max_tokens=60, stop_token_ids=[token_id], include_stop_str_in_output=include)
        choice = make().generate("tell", params)[0].choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", token_id)
        assert choice.token_ids == free.token_ids[: end + 1]
        assert choice.text == free.text[: end + include]


def test_nothing_ends_a_choice_before_its_least_length() -> None:
    free = make().generate("tell", SamplingParams(seed=1, max_tokens=60))[0].choices[0]
    first = free.text[2]
    params = SamplingParams(seed=1, max_tokens=60, stop=[first], stop_token_ids=[free.token_ids[0]], min_tokens=30)
    choice = make().generate("tell", params)[0].choices[0]
    assert len(choice.token_ids) >= 30


def test_the_end_of_sequence_ends_unless_ignored() -> None:
    prompts = [[i] * 5 for i in range(30)]
    outputs = make(fake_eos_every=4).generate(prompts, SamplingParams(seed=1, max_tokens=50))
    for output in outputs:
        choice = output.choices[0]
        assert choice.finish_reason == ("stop" if choice.token_ids[-1] == EOS else "length")
        assert choice.stop_reason is None and EOS not in choice.token_ids[:-1]
    assert any(output.choices[0].finish_reason == "stop" for output in outputs)
    outputs = make(fake_eos_every=4).generate(prompts, SamplingParams(seed=1, max_tokens=50, ignore_eos=True))
    assert {output.choices[0].finish_reason for output in outputs} == {"length"}


class Emoji(FakeRunner):
    """Writes 😀 over and over, a byte at a time."""

    def _token(self, sequence: Any, digest: int) -> int:
        return "😀".encode()[sequence.num_output_tokens % 4]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_a_cut_character_is_replaced_once_and_both_ways_agree(max_tokens: int) -> None:
    """Case 28."""
    whole = make(Emoji).generate("x", SamplingParams(max_tokens=max_tokens))[0].choices[0].text
    llm = make(Emoji)
    llm.add_request("r", "x", SamplingParams(max_tokens=max_tokens))
    deltas = [choice.text for step in run(llm)["r"] for choice in step.deltas]
    assert "".join(deltas) == whole == "😀" * (max_tokens // 4) + "�" * bool(max_tokens % 4)


# ---- continuation


@pytest.mark.parametrize("num_emitted", [(0, 0, 0), (5, 0, 9), (1, 2, 3), (12, 12, 12), (12, 3, 0)])
def test_a_request_goes_on_behind_what_it_has_emitted(num_emitted: tuple[int, ...]) -> None:
    params: dict[str, Any] = {"n": 3, "seed": 3, "max_tokens": 12}
    expected = alone("go on", **params)
    emitted = [choice.token_ids[:count] for choice, count in zip(expected.choices, num_emitted, strict=True)]
    llm = make()
    llm.add_request("r", "go on", SamplingParams(**params), emitted=emitted)
    told = run(llm)["r"]
    invariants.each_thing_told_once(told)
    for choice, before in zip(expected.choices, emitted, strict=True):
        parts = [delta for step in told for delta in step.deltas if delta.index == choice.index]
        assert before + [token for part in parts for token in part.token_ids] == choice.token_ids
        already = llm.tokenizer.decode(before)
        assert already + "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
    llm.check_integrity()


def test_choices_that_were_at_their_end_are_told_as_finished_and_not_run() -> None:
    free = alone("tell", seed=1, max_tokens=60).choices[0]
    stop = free.text[20:24]
    stopped = alone("tell", seed=1, max_tokens=60, stop=(stop,)).choices[0]
    llm = make()
    llm.add_request("r", "tell", SamplingParams(seed=1, max_tokens=60, stop=[stop]), emitted=[stopped.token_ids])
    (told,) = run(llm)["r"]
    assert told.finished and told.deltas[0].token_ids == [] and told.deltas[0].text == ""
    assert (told.deltas[0].finish_reason, told.deltas[0].stop_reason) == ("stop", stop)
    assert llm.stats().num_steps == 0


def test_text_held_back_before_a_hand_over_is_said_after_it() -> None:
    expected = alone("tell", seed=1, max_tokens=30).choices[0]
    stop = expected.text[9:11] + "never"  # after 11 tokens, two characters may still become this stop
    llm = make()
    params = SamplingParams(seed=1, max_tokens=30, stop=[stop])
    llm.add_request("r", "tell", params, emitted=[expected.token_ids[:11]])
    text = "".join(choice.text for step in run(llm)["r"] for choice in step.deltas)
    assert text == expected.text[9:]


@pytest.mark.parametrize("emitted", [[[1], [1]], [[260]], [[-1]], [["a"]]])
def test_what_was_emitted_is_checked(emitted: Any) -> None:
    with pytest.raises(InvalidRequest, match="emitted"):
        make().add_request("r", "a", SamplingParams(), emitted=emitted)


def test_prompt_logprobs_are_told_once_also_when_going_on() -> None:
    params: dict[str, Any] = {"seed": 3, "max_tokens": 12, "prompt_logprobs": 2}
    expected = alone("go on", **params)
    llm = make()
    llm.add_request("r", "go on", SamplingParams(**params), emitted=[expected.choices[0].token_ids[:5]])
    told = run(llm)["r"]
    assert [step.prompt_logprobs is not None for step in told] == [True] + [False] * (len(told) - 1)
    assert told[0].prompt_logprobs == expected.prompt_logprobs


# ---- failures


BAD = "Bad, and several blocks long so that there is something to free"


class Failing(FakeRunner):
    """Raises for every step that holds a prompt with this byte, as a forward with a bad row would."""

    def execute(self, plan: Plan) -> StepResult:
        if any(66 in row.sequence.prompt_token_ids for row in plan.rows):
            raise ValueError("cannot compute this")
        return super().execute(plan)


@pytest.mark.parametrize("n", [1, 3])
def test_a_row_that_cannot_be_computed_fails_alone(n: int) -> None:
    llm = make(Failing, max_num_batched_tokens=64)
    prompts = ["good a", "good b", BAD, "good c", "good d"]
    outputs = llm.generate(prompts, SamplingParams(n=n, seed=1, max_tokens=9))
    for prompt, output in zip(prompts, outputs, strict=True):
        if prompt == BAD:
            assert [choice.finish_reason for choice in output.choices] == ["error"] * n
            assert all("cannot compute this" in (choice.error or "") for choice in output.choices)
        else:
            invariants.outputs_equal_alone(output, alone(prompt, n=n, seed=1, max_tokens=9))
    assert llm.stats().num_failed_rows == 1 and llm.stats().num_held_blocks == 0
    llm.check_integrity()


def test_bad_rows_among_good_ones_do_not_pass_for_a_dead_device() -> None:
    llm = make(Failing)
    for _ in range(2 * MAX_FAILURES_IN_A_ROW):
        assert llm.generate(BAD, SamplingParams(max_tokens=2))[0].choices[0].finish_reason == "error"
        assert llm.generate("good", SamplingParams(max_tokens=2))[0].choices[0].finish_reason == "length"


class Dead(FakeRunner):
    def execute(self, plan: Plan) -> StepResult:
        if plan.rows and plan.step_index > 2:
            raise RuntimeError("device-side assert")
        return super().execute(plan)


@pytest.mark.parametrize("num_requests", [1, 20])
def test_a_device_that_fails_everything_is_reported_as_such(num_requests: int) -> None:
    llm = make(Dead)
    ended: list[str] = []
    with pytest.raises(DeviceFailed, match=f"{MAX_FAILURES_IN_A_ROW} requests failed in a row.*device-side assert"):
        for index in itertools.count():
            if index < 20:
                for copy in range(num_requests if index == 0 else 1):
                    llm.add_request(f"r{index}.{copy}", "a", SamplingParams(max_tokens=30))
            ended += [delta.request_id for delta in llm.step() if delta.finished]
    assert len(ended) <= MAX_FAILURES_IN_A_ROW
    assert llm.has_unfinished()  # to be handed over


class Lost(FakeRunner):
    def execute(self, plan: Plan) -> StepResult:
        self.is_lost = getattr(self, "is_lost", False) or plan.step_index > 2
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")
        return super().execute(plan)


def test_a_device_that_is_lost_ends_no_request() -> None:
    llm = make(Lost)
    for index in range(3):
        llm.add_request(f"r{index}", "a", SamplingParams(max_tokens=30))
    ended = [delta for _ in range(2) for delta in llm.step() if delta.finished]
    with pytest.raises(DeviceFailed, match="does not even copy a block any more: an illegal memory access"):
        llm.step()
    assert not ended and llm.stats().num_requests == 3 and llm.stats().num_failed_rows == 0
    llm.check_integrity()


class NotANumber(FakeRunner):
    """One draw fails: choice 1 of whatever it is, at its fourth token."""

    def _draw(self, sequence: Any, digest: int) -> Sampled:
        if sequence.choice == 1 and sequence.num_output_tokens == 3:
            return Sampled(None, error="logits are NaN")
        return super()._draw(sequence, digest)


def test_a_draw_that_fails_ends_only_its_choice() -> None:
    choices = make(NotANumber).generate("a", SamplingParams(n=3, seed=1, max_tokens=9))[0].choices
    assert [choice.finish_reason for choice in choices] == ["length", "error", "length"]
    assert choices[1].error == "logits are NaN" and len(choices[1].token_ids) == 3 and len(choices[1].text) == 3
    expected = alone("a", n=3, seed=1, max_tokens=9).choices
    assert (choices[0], choices[2]) == (expected[0], expected[2])


class NoFirstToken(FakeRunner):
    def _draw(self, sequence: Any, digest: int) -> Sampled:
        return Sampled(None, error="empty support") if sequence.choice != 1 else super()._draw(sequence, digest)


def test_first_draws_that_fail_leave_the_others_running() -> None:
    llm = make(NoFirstToken)
    choices = llm.generate("a" * 20, SamplingParams(n=3, seed=1, max_tokens=9))[0].choices
    assert [choice.finish_reason for choice in choices] == ["error", "length", "error"]
    llm.check_integrity()
    assert llm.stats().num_held_blocks == 0


def test_poison_kills_the_process_when_its_prompt_is_computed() -> None:
    code = (
        "from engine import LLM, EngineConfig, SamplingParams as P\n"
        "llm = LLM('fake', EngineConfig(fake_poison='arsenic'))\n"
        "llm.generate('milk', P(max_tokens=2)); print('milk is fine', flush=True)\n"
        "llm.add_request('r', 'some arsenic, please', P(max_tokens=2)); print('queued', flush=True)\n"
        "llm.step(); print('survived', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.splitlines() == ["milk is fine", "queued"]


# ---- numbers


def test_stats_add_up() -> None:
    harness = Harness(block_size=8, num_kv_blocks=20, num_host_slots=8, max_num_seqs=2)
    for index in range(4):
        harness.add(f"r{index}", [index] * 20, max_tokens=10, seed=1)
    before = harness.llm.stats()
    assert (before.num_requests, before.num_waiting, before.num_running, before.free_tokens) == (4, 4, 0, 160 - 80)
    harness.step()
    stats = harness.llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (2, 2, 0)
    assert stats.num_held_blocks == 6 and stats.kv_usage == 0.3
    assert stats.free_tokens == 14 * 8 - 2 * 20
    harness.run()
    stats = harness.llm.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (80, 40)
    assert stats.num_computed_tokens == 80 + 4 * 9 and stats.num_free_blocks + stats.num_cached_blocks == 20
    assert stats.free_tokens == 160 and stats.kv_waste == 0.0


def test_rates_are_measured_on_the_engines_clock() -> None:
    llm = make(fake_seconds_per_step=0.001, fake_seconds_per_token=0.0002)
    assert llm.stats().prefill_tokens_per_s is None and llm.stats().decode_tokens_per_s is None
    llm.generate(["a" * 100, "b" * 100], SamplingParams(max_tokens=5))
    stats = llm.stats()
    assert 0 < (stats.prefill_tokens_per_s or 0) <= 5000 and 0 < (stats.decode_tokens_per_s or 0) <= 2000


def test_simulated_costs_can_be_spent_on_a_clock_of_ones_own() -> None:
    spent: list[float] = []
    config = EngineConfig(fake_seconds_per_step=2.0, fake_seconds_per_token=0.5)
    llm = LLM(load_fake(config, sleep=spent.append), config, clock=lambda: sum(spent))
    output = llm.generate([[1] * 10], SamplingParams(max_tokens=4))[0]
    assert spent == [7.0, 2.5, 2.5, 2.5]
    assert (output.timeline.prefill_seconds, output.timeline.decode_seconds) == (7.0, 7.5)
    assert llm.stats().decode_tokens_per_s == 0.4


def test_the_timeline_tells_waiting_from_working() -> None:
    harness = Harness(block_size=8, num_kv_blocks=64, max_num_seqs=1, max_num_batched_tokens=16)
    harness.add("first", [1] * 10, max_tokens=11)
    harness.add("second", [2] * 40, max_tokens=6)
    harness.run()
    timeline = harness.output("second").timeline
    assert timeline.queued_seconds == pytest.approx(0.12)  # eleven steps of the first, and its own first one
    assert timeline.prefill_seconds == pytest.approx(0.02)
    assert timeline.decode_seconds == pytest.approx(0.05)


def test_an_empty_engine_steps_to_nothing() -> None:
    llm = make()
    assert llm.step() == [] and not llm.has_unfinished() and llm.abort("nobody") is None


def test_the_cache_can_be_dropped() -> None:
    llm = make()
    llm.generate("a" * 64, SamplingParams(max_tokens=1))
    assert llm.drop_prefix_cache() == 4
    assert llm.generate("a" * 64, SamplingParams(max_tokens=1))[0].num_cached_tokens == 0


def test_a_loaded_model_with_blocks_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="block_size: is 32, and the loaded model keeps blocks of 16"):
        LLM(load_fake(EngineConfig(block_size=16)), EngineConfig(block_size=32))
