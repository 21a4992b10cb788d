"""TensorRT-LLM #17158; sglang PR #28153: NaN, infinities and other numbers that are none kill a server or a batch.

Kind: a number outside of what arithmetic expects. Siblings: every float and every whole number of the parameters, as
Python values, as JSON and as raw JSON that strict readers refuse; text that looks like numbers; the least and the
greatest that are allowed, in one batch; logit_bias values and keys; deadlines; engine settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from engine import LLM, EngineConfig, InvalidRequest, SamplingParams
from tests.cases.service import MODEL
from tests.cases.trial import Trial, prompt_of

FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
          "length_penalty", "deadline"]  # fmt: skip
INTEGERS = ["n", "best_of", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "priority"]
NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, "nan", "1", "", [], {}, True, None]
OFTEN_BAD: list[Any] = [-1, -1e-30, -0.0, 1e-30, 5e-324, 1e308, 2**63, -(2**63) - 1, 10**400, 0, 0.5]

# Allowed to the letter, and hard on the arithmetic: a defined result, and no harm to the next row.
EXTREMES: dict[str, dict[str, Any]] = {
    "hottest": {"temperature": 100.0},
    "coldest": {"temperature": 1e-5},
    "greedy by a hair": {"temperature": 1e-30},
    "denormal": {"temperature": 5e-324, "min_p": 5e-324},
    "a hair of probability": {"top_p": 1e-30},
    "denormal probability": {"top_p": 5e-324, "temperature": 100.0},
    "only the best": {"min_p": 1.0, "temperature": 100.0},
    "hair of a floor": {"min_p": 1e-30},
    "all but a hair": {"top_p": 1.0 - 1e-16},
    "heavy": {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    "light": {"repetition_penalty": 0.01, "presence_penalty": -2.0, "frequency_penalty": -2.0},
    "biased": {"logit_bias": {str(token): 100.0 * (-1) ** token for token in range(300)}},
    "cold and heavy": {"temperature": 1e-5, "top_p": 1e-30, "min_p": 1.0, "top_k": 1, "repetition_penalty": 0.01},
}


@pytest.mark.parametrize("field", FLOATS + INTEGERS)
def test_every_number_is_refused_by_name_or_defined(field: str) -> None:
    """In Python: the engine raises InvalidRequest naming the field, or answers; a neighbour never notices."""
    llm = LLM("fake", EngineConfig(num_kv_blocks=64))
    expected = llm.generate("good", SamplingParams(seed=1, max_tokens=4))[0].choices
    for value in [*NO_NUMBERS, *OFTEN_BAD]:
        if value is None and field in ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "deadline"):
            continue  # leaves it out
        fields = {"max_tokens": 4, field: value}
        try:
            [found] = llm.generate("bad", SamplingParams(**fields))
        except InvalidRequest as error:
            assert error.param == field
            assert not llm.has_unfinished()
        else:
            assert not (isinstance(value, float) and not math.isfinite(value)), value
            assert not isinstance(value, str | list | dict | bool) and value is not None, value
            assert all(choice.finish_reason == "length" for choice in found.choices)
        assert llm.generate("good", SamplingParams(seed=1, max_tokens=4))[0].choices == expected


def test_extremes_in_one_batch(trial: Callable[..., Trial]) -> None:
    """Each has the result that it has alone, and the plain request among them has its own."""
    engine = trial(max_num_seqs=32, num_kv_blocks=200)
    engine.add("plain", prompt_of(12), max_tokens=5, logprobs=2)
    for name, params in EXTREMES.items():
        biases = {"logit_bias": {int(k): v for k, v in params["logit_bias"].items()}} if "logit_bias" in params else {}
        engine.add(name, prompt_of(12), max_tokens=5, logprobs=2, **{**params, **biases})
    engine.run()
    for name in EXTREMES:
        (choice,) = engine.output(name).choices
        assert choice.finish_reason == "length" and len(choice.token_ids) == 5
        assert choice.logprobs is not None
        for entry in choice.logprobs:
            assert all(math.isfinite(one.logprob) for one in (entry.chosen, *entry.top))
    greedy = trial().ask(prompt_of(12), max_tokens=5, temperature=0.0).choices[0].token_ids
    for name in ("coldest", "greedy by a hair", "denormal", "a hair of probability", "only the best"):
        assert engine.output(name).choices[0].token_ids == greedy, name
    engine.assert_all_as_alone()


OVER_HTTP = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
             "length_penalty", "n", "best_of", "top_k", "seed", "max_tokens", "min_tokens", "priority"]  # fmt: skip


async def test_over_http_every_field_answers_in_json(service: Callable[..., Any]) -> None:
    """Raw JSON too, which Python's reader would take: a 4xx that names the field, or 200; the good ones are unhurt."""
    served = await service(lambda: LLM("fake", EngineConfig(num_kv_blocks=256)))
    raw = ["NaN", "Infinity", "-Infinity", "-1", "1e-30", "1e999", '"nan"', '"Infinity"', "1e400", "[]", "{}", "true",
           "9" * 400, "-0.0", "0x1p3", "1_000"]  # fmt: skip
    for field in OVER_HTTP:
        for text in raw:
            body = f'{{"model": "{MODEL}", "prompt": "x", "max_tokens": 2, "{field}": {text}}}'
            if field == "max_tokens":
                body = f'{{"model": "{MODEL}", "prompt": "x", "max_tokens": {text}}}'
            status, answer = await served.post("completions", body.encode())
            if status == 200:
                assert text in ("-1", "1e-30", "-0.0"), (field, text)
                assert answer["usage"]["completion_tokens"] > 0
            else:
                assert 400 <= status < 500, (field, text, status, answer)
                is_json = text not in ("NaN", "Infinity", "-Infinity", "0x1p3", "1_000")
                assert answer["error"]["param"] == field or not is_json, (field, text, answer)
    await served.assert_healthy()


async def test_over_http_extremes_have_a_defined_result(service: Callable[..., Any]) -> None:
    served = await service(lambda: LLM("fake", EngineConfig(num_kv_blocks=256)))
    for name, params in EXTREMES.items():
        params = {**params, "logit_bias": {k: v for k, v in params.get("logit_bias", {}).items() if int(k) < 256}}
        for route, ask in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [USER]})):
            status, answer = await served.post(route, {**ask, "max_tokens": 3, **params})
            assert status == 200 and answer["usage"]["completion_tokens"] == 3, (name, answer)
    await served.assert_healthy()


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, 100.1, -100.1, "1", None, [1]])
def test_biases_are_numbers_too(bias: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LLM("fake").generate("x", SamplingParams(logit_bias={3: bias}))
    assert caught.value.param.startswith("logit_bias")


@pytest.mark.parametrize("key", ["nan", "1.0", "1e2", "", " 1", "0x1", "-1", "٣", "9" * 40])
async def test_keys_of_biases_over_http(service: Callable[..., Any], key: str) -> None:
    served = await service(lambda: LLM("fake", EngineConfig(num_kv_blocks=64)))
    status, answer = await served.post("completions", {"prompt": "x", "max_tokens": 1, "logit_bias": {key: 1}})
    assert status == 400 and "logit_bias" in answer["error"]["param"], answer
    assert json.dumps(answer, allow_nan=False)


USER = {"role": "user", "content": "x"}
