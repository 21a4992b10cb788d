"""sglang #40076, PR #17788: top_k over the vocabulary or over int32, top_logprobs over the vocabulary.

Kind: a count of tokens beyond those there are. Siblings: exactly the vocabulary and one beside it, alone and in a
batch; with top_p and min_p; the padding that a model's last matrix has behind its vocabulary; ids of stops and biases;
logprobs of more tokens than there are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, EngineConfig, InvalidRequest
from engine.fake_runner import VOCAB_SIZE
from tests.cases.conftest import load_native
from tests.cases.trial import VOCABULARY, Trial, prompt_of
from tests.models import make_tiny_model

HUGE = [VOCABULARY - 1, VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**31, 2**63 - 1]


@pytest.mark.parametrize("others", [{}, {"top_p": 0.8, "n": 2}])
def test_a_huge_top_k_is_none_at_all(trial: Callable[..., Trial], others: dict[str, Any]) -> None:
    """Alone and in a batch: the tokens of the same seed without a top_k; VOCABULARY - 1 leaves out one token."""
    without = trial().ask(prompt_of(9), max_tokens=10, **others).choices
    engine = trial()
    for top_k in (*HUGE, 0, -1):
        assert trial().ask(prompt_of(9), max_tokens=10, top_k=top_k, **others).choices == without
        engine.add(f"top {top_k}", prompt_of(9), max_tokens=10, top_k=top_k, **others)
    engine.add("neighbour", prompt_of(9), max_tokens=10, top_k=3)
    engine.run()
    for top_k in (*HUGE, 0, -1):
        assert engine.output(f"top {top_k}").choices == without
    engine.assert_all_as_alone()


@pytest.mark.parametrize("vocab_size", [15, 321])
def test_what_pads_the_last_matrix_is_never_drawn_nor_reported(tmp_path: Path, vocab_size: int) -> None:
    """Vocabularies of no round size, hot sampling, all logprobs there are: no id outside, each one once."""
    folder = make_tiny_model(tmp_path / "odd", overrides={"vocab_size": vocab_size, "bos_token_id": 1})
    engine = Trial(load_native(folder, num_threads=1))
    num_top = min(20, vocab_size)
    params = {"max_tokens": 40, "logprobs": num_top, "prompt_logprobs": num_top}
    unfiltered = engine.ask([1, vocab_size - 1], temperature=100.0, top_k=vocab_size + 5, n=4, **params)
    filtered = engine.ask([1, vocab_size - 1], temperature=100.0, min_p=1e-30, n=2, **params)
    for choice in (*unfiltered.choices, *filtered.choices):
        assert all(0 <= token_id < vocab_size for token_id in choice.token_ids)
        for entry in choice.logprobs or []:
            ids = [one.token_id for one in entry.top]
            assert len(set(ids)) == num_top and all(0 <= token_id < vocab_size for token_id in ids)
            assert 1 <= entry.chosen.rank <= vocab_size
    if vocab_size < 20:
        with pytest.raises(InvalidRequest, match="logprobs: is 20"):
            engine.ask([1], logprobs=20)
    engine.assert_all_as_alone()


async def test_over_http(service: Callable[..., Any]) -> None:
    served = await service(lambda: LLM("fake", EngineConfig(num_kv_blocks=256)))
    ask: dict[str, Any] = {"prompt": "x", "max_tokens": 6, "seed": 3}
    _, plain = await served.post("completions", ask)
    for top_k in (VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**63 - 1):
        status, answer = await served.post("completions", {**ask, "top_k": top_k})
        assert status == 200 and answer["choices"][0]["text"] == plain["choices"][0]["text"]
    for top_k in (2**63, 2**64, 10**30, -2):
        status, answer = await served.post("completions", {**ask, "top_k": top_k})
        assert status == 400 and answer["error"]["param"] == "top_k"
    messages = [{"role": "user", "content": "x"}]
    for count in (21, VOCAB_SIZE + 1, 2**31, 2**63, -1):
        status, answer = await served.post(
            "chat/completions", {"messages": messages, "max_tokens": 1, "logprobs": True, "top_logprobs": count}
        )
        assert status == 400 and answer["error"]["param"] == "top_logprobs", answer
        status, answer = await served.post("completions", {**ask, "logprobs": count})
        assert status == 400 and answer["error"]["param"] == "logprobs"
        status, answer = await served.post("completions", {**ask, "prompt_logprobs": count})
        assert status == 400 and answer["error"]["param"] == "prompt_logprobs"
    await served.assert_healthy()
