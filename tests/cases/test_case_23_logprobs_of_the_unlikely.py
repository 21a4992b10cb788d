"""vLLM #10234; sglang #5984: logprobs of filtered or forbidden tokens are infinite, and the answer is no JSON.

Kind: what is reported about what cannot be drawn. Defined here: logprobs are of the model's own distribution, before
biases, penalties, filters and temperature, and rank 1 is the most likely in it. Siblings: top_k 1, logit_bias of 100
either way, bad words, min_tokens, penalties, tiny temperatures; cumulative logprobs; both routes, blocking and
streamed; prompt logprobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import LLM, EngineConfig
from engine.config import LoadedModel
from tests.cases.trial import VOCABULARY, Trial, prompt_of
from tests.engine.runner_aids import direct_logits

UNLIKELY: list[dict[str, Any]] = [
    {"top_k": 1, "logit_bias": dict.fromkeys(range(0, VOCABULARY, 2), -100.0)},
    {"logit_bias": {7: 100.0}},
    {"top_p": 1e-9, "repetition_penalty": 100.0},
    {"bad_words": ["e", "a", "t", "in"], "min_tokens": 8, "ignore_eos": False},
    {"temperature": 1e-5, "presence_penalty": 2.0},
    {"min_p": 1.0, "frequency_penalty": -2.0},
]


@pytest.mark.parametrize("params", UNLIKELY)
def test_logprobs_are_the_models_own(trial: Callable[..., Trial], tiny: LoadedModel, params: dict[str, Any]) -> None:
    engine = trial()
    output = engine.ask(prompt_of(12), max_tokens=8, logprobs=20, prompt_logprobs=20, **params)
    (choice,) = output.choices
    whole = [*output.prompt_token_ids, *choice.token_ids]
    expected = direct_logits(tiny, whole).log_softmax(-1)[len(output.prompt_token_ids) - 1 :]
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
    for entry, row, token_id in zip(choice.logprobs, expected, choice.token_ids, strict=False):
        assert entry.chosen.token_id == token_id
        assert entry.chosen.logprob == pytest.approx(row[token_id].item(), abs=1e-5)
        assert entry.chosen.rank == 1 + int((row > row[token_id]).sum())
        assert [one.token_id for one in entry.top] == row.topk(20).indices.tolist()
        assert torch.allclose(torch.tensor([one.logprob for one in entry.top]), row.topk(20).values, atol=1e-5)
    total = sum(entry.chosen.logprob for entry in choice.logprobs)
    assert choice.cumulative_logprob == pytest.approx(total) and math.isfinite(total)
    engine.assert_all_as_alone()


def test_a_forbidden_best_is_reported_and_not_drawn(trial: Callable[..., Trial]) -> None:
    engine = trial()
    free = engine.ask(prompt_of(12), max_tokens=1, temperature=0.0, logprobs=2).choices[0]
    assert free.logprobs is not None
    best, second = free.logprobs[0].top
    bent = engine.ask(prompt_of(12), max_tokens=1, top_k=1, logit_bias={best.token_id: -100.0}, logprobs=2).choices[0]
    assert bent.token_ids == [second.token_id] and bent.logprobs is not None
    assert bent.logprobs[0].top == (best, second) and bent.logprobs[0].chosen == second


async def test_over_http_it_is_json(service: Callable[..., Any], tiny: LoadedModel) -> None:
    config = EngineConfig(num_kv_blocks=64)
    served = await service(lambda: LLM(tiny, config))
    messages = [{"role": "user", "content": "x"}]
    for params in UNLIKELY:
        params = {**params, "max_tokens": 8, "seed": 1}
        if "logit_bias" in params:
            params["logit_bias"] = {str(token): bias for token, bias in params["logit_bias"].items()}
        status, answer = await served.post("completions", {"prompt": "x", "logprobs": 20, **params})
        assert status == 200, answer
        told = answer["choices"][0]["logprobs"]
        assert len(told["token_logprobs"]) == len(told["tokens"]) == answer["usage"]["completion_tokens"]
        chat = {"messages": messages, "logprobs": True, "top_logprobs": 20, **params}
        status, answer = await served.post("chat/completions", chat)
        assert status == 200, answer
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        chunks = await served.chunks("chat/completions", chat)
        streamed = [one for chunk in chunks for choice in chunk["choices"]
                    for one in (choice.get("logprobs") or {}).get("content") or []]  # fmt: skip
        assert streamed == content
        for entry in content:
            assert len(entry["top_logprobs"]) == 20 and all(one["logprob"] <= 0 for one in entry["top_logprobs"])
    await served.assert_healthy()
