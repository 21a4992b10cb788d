"""Beams and best_of over HTTP: every route takes them, streams say nothing before the end, and bad ones are refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.outputs import Choice
from tests.cases.service import MODEL, Service, serve

BEAMS: dict[str, Any] = {"n": 3, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
BEST_OF: dict[str, Any] = {"n": 2, "best_of": 5, "seed": 7, "temperature": 0.9}
BOTH = pytest.mark.parametrize("params", [BEAMS, BEST_OF], ids=["beams", "best_of"])
MESSAGES = [{"role": "user", "content": "hello"}]


def load() -> LLM:
    return LLM("fake", EngineConfig(num_kv_blocks=256, max_num_seqs=16))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Service]:
    async with serve(tmp_path / "blobs", load) as service:
        yield service


def alone(prompt: str, **params: Any) -> list[Choice]:
    return load().generate([prompt], SamplingParams(**params))[0].choices


@BOTH
async def test_every_route_gives_the_engines_choices(served: Service, params: dict[str, Any]) -> None:
    expected = [choice.text for choice in alone("hello", max_tokens=8, **params)]
    status, body = await served.post("completions", {"prompt": "hello", "max_tokens": 8, **params})
    assert status == 200, body
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"]["completion_tokens"] == 8 * params["n"]
    chat = [c.text for c in alone("<|user|>hello<|end|><|assistant|>", max_tokens=8, **params)]
    status, body = await served.post("chat/completions", {"messages": MESSAGES, "max_tokens": 8, **params})
    assert status == 200, body
    assert [choice["message"]["content"] for choice in body["choices"]] == chat


@BOTH
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_a_stream_is_silent_until_all_is_known(
    served: Service, params: dict[str, Any], logprobs: int | None
) -> None:
    ask = {"prompt": "hello", "max_tokens": 8, **params}
    if logprobs is not None:
        ask["logprobs"] = logprobs
    chunks = await served.chunks("completions", ask)
    expected = alone("hello", max_tokens=8, **params)
    for choice in expected:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice.index]
        assert "".join(one["text"] for one in mine) == choice.text
        assert [one["finish_reason"] for one in mine][-1] == "length"
        assert sum(bool(one["text"]) for one in mine) == 1  # the whole at once


@BOTH
async def test_a_job_says_what_its_choices_were_ranked_by(served: Service, params: dict[str, Any]) -> None:
    ask = {"model": MODEL, "kind": "generate", "input": "hello", "params": {"max_tokens": 8, **params}}
    answer = await served.client.post("/v1/jobs", json=ask, headers={"prefer": "wait=30"})
    body = json.loads(answer.content)
    body = (await served.client.get(f"/v1/jobs/{body['id']}", params={"wait": "30"})).json()
    assert body["status"] == "succeeded", body
    found = [(one["text"], one["score"], one["cumulative_logprob"]) for one in body["result"]["choices"]]
    assert found == [
        (one.text, pytest.approx(one.score), pytest.approx(one.cumulative_logprob))
        for one in alone("hello", max_tokens=8, **params)
    ]
    events = (await served.client.get(f"/v1/jobs/{body['id']}/events")).text
    (delta,) = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ") and "deltas" in line]
    assert [one["score"] for one in delta["deltas"]] == [pytest.approx(score) for _, score, _ in found]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.5), ("temperature", 0), ("top_p", 0.5), ("top_k", 4), ("min_p", 0.2), ("length_penalty", 1000),
     ("early_stopping", "perhaps"), ("best_of", 2)],
)  # fmt: skip
async def test_what_beams_do_not_take_is_refused_by_name(served: Service, field: str, value: Any) -> None:
    for route, ask in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
        status, body = await served.post(route, {**ask, "max_tokens": 4, **BEAMS, field: value})
        assert status == 400 and body["error"]["param"] == field, body
    ask = {"model": MODEL, "input": "x", "params": {"max_tokens": 4, **BEAMS, field: value}}
    answer = await served.client.post("/v1/jobs", json=ask)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == f"params.{field}"


async def test_beams_that_the_worker_cannot_run_together_fail_alone_with_the_numbers(served: Service) -> None:
    status, body = await served.post("completions", {"prompt": "x", "max_tokens": 4, "n": 17, "use_beam_search": True})
    assert status == 400 and body["error"]["param"] == "n", body
    assert "17 beams, and max_num_seqs lets 16 run together" in body["error"]["message"]
    await served.assert_healthy()
