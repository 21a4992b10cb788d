"""vLLM #7283, PR #16529: empty prompts, and token ids that the vocabulary does not have, kill the engine.

Kind: input that indexes nothing. Siblings: every kind of empty prompt and of bad id on every route, hidden behind good
ones; ids of stops, biases and bad words; text of special tokens, of half characters, of NUL; what is only whitespace;
running requests go on throughout.
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

BAD_PROMPTS: list[Any] = ["", [], {}, {"prompt": ""}, {"prompt_token_ids": []}, [-1], [VOCABULARY], [3, 2**31],
    [3, 2**64], [3, -(2**70)], [3, 4.0], [3, None], [3, "4"], [[3]], b"3", "\ud800", {"prompt": None}, None, 3, {3: 4},
    {"prompt": "x", "prompt_token_ids": [3]}, {"prompt_token_ids": [3, VOCABULARY]}]  # fmt: skip
BAD_PARAMS: list[dict[str, Any]] = [{"logit_bias": {VOCABULARY: 1.0}}, {"logit_bias": {-1: 1.0}},
    {"logit_bias": {2**40: 1.0}}, {"stop_token_ids": [VOCABULARY]}, {"stop_token_ids": [-1]}, {"stop": [""]},
    {"stop": ["ok", ""]}, {"bad_words": [""]}, {"stop_token_ids": [2**40]}]  # fmt: skip


def test_bad_input_among_running_requests(trial: Callable[..., Trial]) -> None:
    """Each is refused by name before anything is queued; whoever runs finishes as alone."""
    engine = trial()
    for index in range(3):
        engine.add(f"r{index}", prompt_of(20 + index), max_tokens=30, n=1 + index)
    for prompt in BAD_PROMPTS:
        engine.step()
        with pytest.raises(InvalidRequest) as caught:
            engine.llm.add_request("bad", prompt)
        assert caught.value.param == "prompt", prompt
    for params in BAD_PARAMS:
        with pytest.raises(InvalidRequest) as caught:
            engine.add("bad", [3], **params)
        assert caught.value.param == next(iter(params))
        engine.step()
    engine.run()
    engine.assert_all_as_alone()
    assert engine.llm.stats().num_prompt_tokens == 20 + 21 + 22


@pytest.mark.parametrize("text", [" ", "\n", "\0", "a\0b", "<|im_end|>", "<|im_start|><|im_end|>", "\ufeff", "�"])
def test_odd_text_is_a_prompt_like_any_other(trial: Callable[..., Trial], text: str) -> None:
    engine = trial()
    output = engine.ask(text, max_tokens=4)
    assert output.num_prompt_tokens >= 1 and len(output.choices[0].token_ids) == 4
    engine.assert_all_as_alone()


def test_text_that_the_model_has_no_tokens_for(tmp_path: Path) -> None:
    """Tokenizers know more tokens than some models have rows for: such text is refused, not looked up past the end."""
    folder = make_tiny_model(tmp_path / "small", overrides={"vocab_size": 72})
    engine = Trial(load_native(folder, num_threads=1))
    known = engine.loaded.tokenizer.encode("ABC")
    assert max(known) < 72 <= max(engine.loaded.tokenizer.encode("the"))
    engine.add("neighbour", "ABC", max_tokens=8)
    engine.step()
    for prompt in ("the", {"prompt": "ABC the"}):
        with pytest.raises(InvalidRequest) as caught:
            engine.llm.add_request("bad", prompt)
        assert caught.value.param == "prompt" and "72" in str(caught.value)
    engine.add("words", "ABC", max_tokens=8, bad_words=["the", "A", "the and A"])
    engine.run()
    assert engine.output("words").choices[0].finish_reason == "length"
    engine.assert_all_as_alone()


def test_an_end_that_the_model_cannot_draw(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "small", overrides={"vocab_size": 72, "eos_token_id": [2, 71, 72, 300]})
    engine = Trial(load_native(folder, num_threads=1))
    engine.ask("ABC", max_tokens=8, min_tokens=4, ignore_eos=False)
    assert engine.output("ask0").choices[0].finish_reason in ("stop", "length")
    engine.assert_all_as_alone()


def test_every_id_of_the_vocabulary_may_be_named(trial: Callable[..., Trial]) -> None:
    engine = trial(num_kv_blocks=128)
    everything = list(range(VOCABULARY))
    engine.add("r", everything, max_tokens=6, stop_token_ids=[0, VOCABULARY - 1], min_tokens=6,
               logit_bias=dict.fromkeys(everything, -100.0))  # fmt: skip
    engine.run()
    engine.assert_all_as_alone()


def test_no_token_left_ends_that_request_alone(trial: Callable[..., Trial]) -> None:
    """All but some are biased away, those are bad words or stops before min_tokens: an error of that request."""
    engine = trial()
    words = [chr(code) for code in range(97, 123)]
    tokenizer = engine.loaded.tokenizer
    letters = {token for word in words for token in tokenizer.encode(word)}
    biases = {token: -100.0 for token in range(VOCABULARY) if token not in letters}
    engine.add("neighbour", prompt_of(9), max_tokens=12)
    engine.add("left", prompt_of(9), max_tokens=5, bad_words=words, logit_bias=biases)
    engine.run()
    (choice,) = engine.output("left").choices
    assert choice.finish_reason == "length"  # a bias of -100 is only a bias: something can still be drawn
    assert not letters & set(choice.token_ids)
    engine.assert_as_alone("neighbour")


async def test_over_http_beside_running_requests(service: Callable[..., Any]) -> None:
    config = EngineConfig(num_kv_blocks=256, fake_seconds_per_step=0.002)
    served = await service(lambda: LLM("fake", config))
    running = await served.client.post("/v1/jobs", json={"model": "fake", "input": "go on", "params": {
        "max_tokens": 200, "seed": 1}})  # fmt: skip
    prompts: list[Any] = ["", [], [""], ["x", ""], [[]], [[1], []], [-1], [VOCAB_SIZE], [[1], [-1]], [2**70], [1.5],
                          [True], [None], ["x", 1], {}, None]  # fmt: skip
    for prompt in prompts:
        status, answer = await served.post("completions", {"prompt": prompt, "max_tokens": 1})
        assert status == 400 and answer["error"]["param"].startswith("prompt"), (prompt, answer)
        status, answer = await served.post("jobs", {"input": prompt, "params": {"max_tokens": 1}})
        assert status == 400 and answer["error"]["param"].startswith("input"), (prompt, answer)
    conversations: list[Any] = [[], None, {}, "", [{}], [None], [{"role": "user", "content": None}], [{"role": "user"}]]
    for messages in conversations:
        status, answer = await served.post("chat/completions", {"messages": messages, "max_tokens": 1})
        assert status == 400 and answer["error"]["param"].startswith("messages"), (messages, answer)
    for name, value in (("logit_bias", {str(VOCAB_SIZE): 1}), ("logit_bias", {"-1": 1}), ("stop", ""), ("stop", [""]),
                        ("stop_token_ids", [VOCAB_SIZE]), ("stop_token_ids", [-1]), ("bad_words", [""])):  # fmt: skip
        status, answer = await served.post("completions", {"prompt": "x", "max_tokens": 1, name: value})
        assert status == 400 and answer["error"]["param"].startswith(name), (name, answer)
    job = (await served.client.get(f"/v1/jobs/{running.json()['id']}", params={"wait": 20})).json()
    assert job["status"] == "succeeded" and job["usage"]["completion_tokens"] == 200
    await served.assert_healthy()


async def test_an_empty_message_is_a_prompt(service: Callable[..., Any]) -> None:
    """The template writes the turns around it, so that there is something to compute."""
    served = await service(lambda: LLM("fake", EngineConfig(num_kv_blocks=256)))
    status, answer = await served.post(
        "chat/completions", {"messages": [{"role": "user", "content": ""}], "max_tokens": 2}
    )
    assert status == 200 and answer["usage"]["prompt_tokens"] == 3
