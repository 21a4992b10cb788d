"""vLLM #16445, #33418: prompts around the context's length, and max_tokens of 0, 1, or none.

Kind: lengths at the edge of the context. Siblings: the pool smaller than the context; logprobs there; n; min_tokens;
chunks; a cached prompt; going on behind emitted tokens to the edge; the same over HTTP, in tokens and in text.

    prompt of L - 1     one token and `length`, whatever max_tokens is
    prompt of L or more refused, naming the numbers
    max_tokens 0        refused; to fill the cache alone ask for 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine import LLM, EngineConfig, InvalidRequest
from tests.cases.trial import Trial, prompt_of

LIMIT = 64


@pytest.mark.parametrize("bound", [{"max_model_len": LIMIT}, {"num_kv_blocks": LIMIT // 8}])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 1000])
def test_prompts_around_the_limit(trial: Callable[..., Trial], bound: dict[str, int], max_tokens: int | None) -> None:
    """The context's own limit, or the pool's where that is less."""
    for chunk in (16, 512):
        engine = trial(max_num_batched_tokens=chunk, **bound)
        assert engine.llm.info.max_model_len == LIMIT
        for length in (LIMIT - 3, LIMIT - 2, LIMIT - 1):
            for n in (1, 2):
                output = engine.ask(prompt_of(length), max_tokens=max_tokens, n=n, logprobs=0, prompt_logprobs=0)
                for choice in output.choices:
                    assert choice.finish_reason == "length"
                    assert len(choice.token_ids) == min(LIMIT - length, max_tokens or LIMIT)
                assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == length
        for length in (LIMIT, LIMIT + 1, 10 * LIMIT):
            with pytest.raises(InvalidRequest, match=f"prompt: has {length} tokens and the context holds {LIMIT}"):
                engine.add("long", prompt_of(length), max_tokens=max_tokens)
        assert not engine.llm.has_unfinished()


@pytest.mark.parametrize("max_tokens", [0, -1, 2**31])
def test_no_tokens_at_all_are_refused(trial: Callable[..., Trial], max_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        trial().add("r", prompt_of(4), max_tokens=max_tokens)


def test_the_edge_from_the_cache_and_behind_emitted_tokens(trial: Callable[..., Trial]) -> None:
    engine = trial(max_model_len=LIMIT)
    whole = engine.ask(prompt_of(40), seed=3).choices[0]
    assert len(whole.token_ids) == LIMIT - 40 and whole.finish_reason == "length"
    assert engine.ask(prompt_of(40), seed=3).choices[0] == whole
    for num_emitted in (0, 1, 23, 24):
        request_id = f"after {num_emitted}"
        engine.add(request_id, prompt_of(40), seed=3, emitted=[whole.token_ids[:num_emitted]])
        engine.run()
        told = [each for delta in engine.deltas[request_id] for each in delta.deltas]
        assert [token for each in told for token in each.token_ids] == whole.token_ids[num_emitted:]
        assert told[-1].finish_reason == "length"


def test_min_tokens_end_at_the_context(trial: Callable[..., Trial]) -> None:
    choice = trial(max_model_len=LIMIT).ask(prompt_of(60), min_tokens=50, ignore_eos=False).choices[0]
    assert (len(choice.token_ids), choice.finish_reason) == (4, "length")


async def test_over_http(service: Callable[..., Any]) -> None:
    served = await service(lambda: LLM("fake", EngineConfig(max_model_len=LIMIT, num_kv_blocks=64)))
    for prompt in ("x" * (LIMIT - 1), [3] * (LIMIT - 1)):
        for given in ({"max_tokens": 1}, {}):
            status, answer = await served.post("completions", {"prompt": prompt, **given})
            assert status == 200, answer
            assert answer["choices"][0]["finish_reason"] == "length"
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (LIMIT - 1, 1, LIMIT)
        status, answer = await served.post("completions", {"prompt": prompt, "max_tokens": 0})
        assert status == 400 and answer["error"]["param"] == "max_tokens"
        status, answer = await served.post("completions", {"prompt": prompt, "max_tokens": 2})
        assert status == 400 and str(LIMIT) in answer["error"]["message"]
    for length in (LIMIT, LIMIT + 1):
        for prompt in ("x" * length, [3] * length):
            status, answer = await served.post("completions", {"prompt": prompt})
            assert status == 400 and answer["error"]["param"] == "prompt"
    await served.assert_healthy()
