"""vLLM #42019, #3251, #8268: prompt_logprobs that a cached prefix leaves out, or that are wrong in the second request.

Kind: what is asked about every prompt token meets a way that skips some. Siblings: cached prefixes in both orders,
chunks of every size, preemption in the middle of the prompt, n > 1, continuation behind emitted tokens, neighbours
that did not ask, prompts of one token, more likely tokens than asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch

from engine.config import LoadedModel
from engine.outputs import RequestOutput
from tests.cases.trial import BLOCK, Trial, prompt_of
from tests.engine.runner_aids import direct_logits

P, Q = prompt_of(20), prompt_of(17, seed=1)


def assert_complete(output: RequestOutput, loaded: LoadedModel, num_top: int) -> None:
    """One entry for each prompt token, the first null, the rest those of a direct forward."""
    entries, prompt = output.prompt_logprobs, output.prompt_token_ids
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    expected = direct_logits(loaded, prompt).log_softmax(-1)
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None and entry.chosen.token_id == prompt[position]
        row = expected[position - 1]
        assert entry.chosen.logprob == pytest.approx(row[prompt[position]].item(), abs=1e-5)
        assert entry.chosen.rank == 1 + int((row > row[prompt[position]]).sum())
        assert [top.rank for top in entry.top] == list(range(1, num_top + 1))
        assert torch.allclose(torch.tensor([top.logprob for top in entry.top]), row.topk(num_top).values, atol=1e-5)


@pytest.mark.parametrize("order", list(permutations(["P", "PQ", "P again"])))
def test_shared_prefixes_in_every_order(trial: Callable[..., Trial], tiny: LoadedModel, order: tuple[str, ...]) -> None:
    engine = trial(max_num_batched_tokens=16)
    for name in order:
        output = engine.ask(P + Q if name == "PQ" else P, max_tokens=2, prompt_logprobs=3)
        assert output.num_cached_tokens == 0
        assert_complete(output, tiny, 3)
    engine.assert_all_as_alone()


def test_they_write_the_cache_for_others_and_leave_theirs_alone(trial: Callable[..., Trial], tiny: LoadedModel) -> None:
    engine = trial()
    engine.ask(P + Q, max_tokens=1, prompt_logprobs=0)
    plain = engine.ask(P + Q, max_tokens=1)
    assert plain.num_cached_tokens == 4 * BLOCK and plain.prompt_logprobs is None
    assert_complete(engine.ask(P + Q, max_tokens=1, prompt_logprobs=20), tiny, 20)
    engine.assert_all_as_alone()


@pytest.mark.parametrize("chunk", [1, 3, 8, 9, 20, 64])
def test_chunks_of_every_size_beside_others(trial: Callable[..., Trial], tiny: LoadedModel, chunk: int) -> None:
    engine = trial(max_num_batched_tokens=max(chunk, 3), max_num_seqs=min(chunk, 3))
    engine.add("plain", Q, max_tokens=8)
    engine.step()
    for index, prompt in enumerate((P, P[:1], P[:2], P + Q)):
        engine.add(f"r{index}", prompt, max_tokens=3, prompt_logprobs=2, n=1 + index % 2)
    engine.run()
    assert engine.output("plain").prompt_logprobs is None
    for index in range(4):
        assert_complete(engine.output(f"r{index}"), tiny, 2)
    engine.assert_all_as_alone()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_while_the_prompt_is_computed(trial: Callable[..., Trial], tiny: LoadedModel, mode: str) -> None:
    """A higher priority arrives after each chunk: the prompt starts over, no entry is missing or told twice."""
    engine = trial(max_num_batched_tokens=8, max_num_seqs=2, num_kv_blocks=12, num_host_slots=64,
                   scheduling_policy="priority", preemption_mode=mode)  # fmt: skip
    engine.add("low", P + Q, max_tokens=6, prompt_logprobs=2, priority=5, n=2)
    for index in range(5):
        engine.step()
        for half in range(2):
            engine.add(f"high{index}{half}", prompt_of(10, seed=index + half), max_tokens=4, priority=0)
        for _ in range(8):
            engine.step()
    engine.run()
    assert engine.output("low").timeline.num_preemptions >= 2
    assert_complete(engine.output("low"), tiny, 2)
    engine.assert_all_as_alone()


def test_they_are_told_once_also_behind_emitted_tokens(trial: Callable[..., Trial], tiny: LoadedModel) -> None:
    whole = trial().ask(P + Q, max_tokens=9, prompt_logprobs=1, n=2)
    for num_emitted in range(9):
        engine = trial(max_num_batched_tokens=16)
        emitted = [choice.token_ids[:num_emitted] for choice in whole.choices]
        engine.add("r", P + Q, max_tokens=9, prompt_logprobs=1, n=2, emitted=emitted)
        engine.run()
        assert engine.output("r").prompt_logprobs == whole.prompt_logprobs
        for before, rest, choice in zip(emitted, engine.output("r").choices, whole.choices, strict=True):
            assert before + rest.token_ids == choice.token_ids
