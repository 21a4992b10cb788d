"""Every bad input is refused before anything is queued, with the field's name, its value, and what to do."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from infra.blobs import Blobs
from infra.clock import ManualClock
from infra.contracts import ModelCard
from infra.memory import MemoryJobs
from infra.settings import GatewaySettings
from infra.store import JobStore
from tests.gateway.gateway_aids import ALIAS, CONTEXT, VOCABULARY, Running, serving
from tests.gateway.scripted import ScriptedWorker, until

HELLO = [{"role": "user", "content": "hello"}]
JOB = {"model": ALIAS, "input": "hello"}
CHAT = {"model": ALIAS, "messages": HELLO}
COMPLETION = {"model": ALIAS, "prompt": "hello"}
PARAMS = {"temperature": -1, "top_p": 1.5, "top_k": -2, "min_p": 2, "n": 0, "max_tokens": 0, "min_tokens": -1,
          "presence_penalty": 3, "frequency_penalty": -3, "repetition_penalty": 0, "seed": 2**70, "logprobs": 21,
          "stop": ["x"] * 65, "stop_token_ids": [VOCABULARY], "logit_bias": {str(VOCABULARY): 1},
          "length_penalty": 2, "best_of": 200}  # fmt: skip

# (route, body, status, param)
CASES: list[tuple[str, Any, int, str | None]] = [
    ("jobs", {**JOB, "model": "nobody"}, 404, "model"),
    ("jobs", {**JOB, "model": ""}, 404, "model"),
    ("jobs", {"model": ALIAS}, 400, "input"),
    ("jobs", {"input": "hello"}, 400, "model"),
    ("jobs", {**JOB, "input": ""}, 400, "input"),
    ("jobs", {**JOB, "input": []}, 400, "input"),
    ("jobs", {**JOB, "input": [""]}, 400, "input[0]"),
    ("jobs", {**JOB, "input": None}, 400, "input"),
    ("jobs", {**JOB, "input": [1, {"role": "user", "content": "x"}]}, 400, "input"),
    ("jobs", {**JOB, "input": [1, -1]}, 400, "input[1]"),
    ("jobs", {**JOB, "input": [1, 2, VOCABULARY]}, 400, "input[2]"),
    ("jobs", {**JOB, "input": [2**80]}, 400, "input[0]"),
    ("jobs", {**JOB, "input": [True]}, 400, "input[0]"),
    ("jobs", {**JOB, "input": [1.5]}, 400, "input[0]"),
    ("jobs", {**JOB, "kind": "chat"}, 400, "kind"),
    ("jobs", {**JOB, "kind": "poem"}, 400, "kind"),
    ("jobs", {**JOB, "input": [{"role": "poet", "content": "x"}]}, 400, "input[0].role"),
    ("jobs", {**JOB, "tier": "gold"}, 400, "tier"),
    ("jobs", {**JOB, "priority": 2**40}, 400, "priority"),
    ("jobs", {**JOB, "priority": "high"}, 400, "priority"),
    ("jobs", {**JOB, "temperature": 1}, 400, "temperature"),
    ("jobs", {**JOB, "params": {"temprature": 1}}, 400, "params.temprature"),
    ("jobs", {**JOB, "params": {"priority": 1}}, 400, "params.priority"),
    ("jobs", {**JOB, "deadline": "tomorrow"}, 400, "deadline"),
    ("jobs", {**JOB, "deadline": "2030-01-01T00:00:00"}, 400, "deadline"),
    ("jobs", {**JOB, "deadline": 1e15}, 400, "deadline"),
    ("jobs", {**JOB, "deadline": 1000}, 422, "deadline"),
    ("jobs", {**JOB, "deadline": "2020-01-01T00:00:00Z"}, 422, "deadline"),
    ("jobs", {**JOB, "queue_ttl": 0}, 400, "queue_ttl"),
    ("jobs", {**JOB, "queue_ttl": -1}, 400, "queue_ttl"),
    ("jobs", {**JOB, "attempt_timeout": 1e9}, 400, "attempt_timeout"),
    ("jobs", {**JOB, "webhook": {"url": "ftp://example.com/x"}}, 400, "webhook.url"),
    ("jobs", {**JOB, "webhook": {"url": "example.com"}}, 400, "webhook.url"),
    ("jobs", {**JOB, "webhook": {"url": "https://"}}, 400, "webhook.url"),
    ("jobs", {**JOB, "webhook": {"url": "https://a b/"}}, 400, "webhook.url"),
    ("jobs", {**JOB, "webhook": {"url": "https://u:p@example.com"}}, 400, "webhook.url"),
    ("jobs", {**JOB, "webhook": {"url": "https://example.com:99999/"}}, 400, "webhook.url"),
    ("jobs", {**JOB, "webhook": {"url": "https://[::1/"}}, 400, "webhook.url"),
    ("jobs", {**JOB, "webhook": {"url": "https://example.com/" + "x" * 3000}}, 400, "webhook.url"),
    ("jobs", {**JOB, "webhook": {}}, 400, "webhook.url"),
    ("jobs", {**JOB, "webhook": {"url": "https://example.com", "events": ["job.danced"]}}, 400, "webhook.events"),
    ("jobs", {**JOB, "metadata": {str(n): "x" for n in range(17)}}, 400, "metadata"),
    ("jobs", {**JOB, "metadata": {"k" * 65: "x"}}, 400, "metadata"),
    ("jobs", {**JOB, "metadata": {"k": "x" * 513}}, 400, "metadata.k"),
    ("jobs", {**JOB, "metadata": {"k": 3}}, 400, "metadata"),
    ("jobs", {**JOB, "input": "b" * CONTEXT}, 400, "input"),
    ("jobs", {**JOB, "input": "b" * (CONTEXT - 2), "params": {"max_tokens": 3}}, 400, "params.max_tokens"),
    ("jobs", 3, 400, None),
    ("jobs", [], 400, None),
    *(("jobs", {**JOB, "params": {name: value}}, 400, f"params.{name}") for name, value in PARAMS.items()),
    *(("jobs", {**JOB, "params": {name: "1"}}, 400, f"params.{name}") for name in PARAMS if name != "stop"),
    ("chat/completions", {**CHAT, "model": "nobody"}, 404, "model"),
    ("chat/completions", {**CHAT, "messages": []}, 400, "messages"),
    ("chat/completions", {"model": ALIAS}, 400, "messages"),
    ("chat/completions", {**CHAT, "messages": "hello"}, 400, "messages"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ("chat/completions", {**CHAT, "messages": [{"content": "x"}]}, 400, "messages[0].role"),
    ("chat/completions", {**CHAT, "messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
    ("chat/completions", {**CHAT, "messages": [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     "messages[1].content[0].type"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400,
     "messages[0].content[0].text"),
    ("chat/completions", {**CHAT, "messages": [{"role": "assistant", "content": "x"}]}, 400, "messages"),
    ("chat/completions", {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400,
     "messages[0].tool_calls"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
     400, "response_format"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    ("chat/completions", {**CHAT, "guided_json": {"type": "object"}, "guided_choice": ["a"]}, 400, "guided_choice"),
    ("chat/completions", {**CHAT, "guided_grammar": "start: missing"}, 400, "guided_grammar"),
    ("chat/completions", {**CHAT, "guided_choice": []}, 400, "guided_choice"),
    ("chat/completions", {**CHAT, "guided_choice": ["a"], "ignore_eos": True}, 400, "ignore_eos"),
    ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, 400, "response_format"),
    ("chat/completions", {**CHAT, "guided_regex": "(a"}, 400, "guided_regex"),
    ("chat/completions", {**CHAT, "top_logprobs": 3}, 400, "top_logprobs"),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("chat/completions", {**CHAT, "logprobs": 3}, 400, "logprobs"),
    ("chat/completions", {**CHAT, "service_tier": "gold"}, 400, "service_tier"),
    ("chat/completions", {**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
    ("chat/completions", {**CHAT, "max_completion_tokens": CONTEXT}, 400, "max_completion_tokens"),
    ("chat/completions", {**CHAT, "max_tokens": 2**70}, 400, "max_tokens"),
    ("chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("chat/completions", {**CHAT, "cache_salt": "x" * 257}, 400, "cache_salt"),
    ("chat/completions", {**CHAT, "chat_template": "{% for a in b %}"}, 400, "chat_template"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "b" * CONTEXT}]}, 400, "messages"),
    ("completions", {**COMPLETION, "prompt": ""}, 400, "prompt"),
    ("completions", {**COMPLETION, "prompt": []}, 400, "prompt"),
    ("completions", {**COMPLETION, "prompt": [""]}, 400, "prompt[0]"),
    ("completions", {**COMPLETION, "prompt": ["good", ""]}, 400, "prompt[1]"),
    ("completions", {**COMPLETION, "prompt": [[]]}, 400, "prompt[0]"),
    ("completions", {**COMPLETION, "prompt": [-1]}, 400, "prompt[0]"),
    ("completions", {**COMPLETION, "prompt": [[1], [2, VOCABULARY]]}, 400, "prompt[1][1]"),
    ("completions", {**COMPLETION, "prompt": ["a", 1]}, 400, "prompt"),
    ("completions", {**COMPLETION, "prompt": ["a"] * 129}, 400, "prompt"),
    ("completions", {**COMPLETION, "echo": True}, 400, "echo"),
    ("completions", {**COMPLETION, "suffix": "x"}, 400, "suffix"),
    ("completions", {**COMPLETION, "prompt": "b" * CONTEXT, "max_tokens": 1}, 400, "prompt"),
    ("completions", {**COMPLETION, "stop": "x" * (1 << 20)}, 400, "stop"),
    ("completions", {**COMPLETION, "stop": ["x"] * 5000}, 400, "stop"),
]  # fmt: skip

RAW = [
    ("jobs", b'{"model": "echo", "input": "x", "params": {"temperature": NaN}}', "params.temperature"),
    ("jobs", b'{"model": "echo", "input": "x", "params": {"top_p": -Infinity}}', "params.top_p"),
    ("jobs", b'{"model": "echo", "input": "x", "params": {"min_p": 1e999}}', "params.min_p"),
    ("jobs", b'{"model": "echo", "input": "x", "params": {"logit_bias": {"1": NaN}}}', "params.logit_bias.1"),
    ("jobs", b'{"model": "echo", "input": "x", "queue_ttl": Infinity}', "queue_ttl"),
    ("chat/completions", b'{"model": "echo", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
     "temperature"),
    ("completions", b'{"model": "echo", "prompt": "x", "presence_penalty": Infinity}', "presence_penalty"),
    ("completions", b'{"model": "echo", "prompt": "x", "temperature": "nan"}', "temperature"),
    ("jobs", b"", None),
    ("jobs", b"{", None),
    ("jobs", b"null", None),
    ("jobs", b'{"model": "echo", "input": "\xff"}', None),
    ("jobs", b'{"model": "echo", "input": "\\ud800"}', None),
    ("jobs", b"[" * 100_000, None),
    ("jobs", b'{"model": "echo", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "input[0]"),
    ("jobs", b'{"model": "echo", "input": "x", "metadata": {"a": ' + b"9" * 10_000 + b"}}", "metadata"),
]  # fmt: skip


async def refused(running: Running, store: JobStore, answer: Any, status: int, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = json.loads(answer.content, parse_constant=pytest.fail)["error"]
    assert error["param"] == param, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["code"]
    if param:
        assert error["message"].startswith(param), error["message"]
    assert len(error["message"]) < 400
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"].startswith("req_")
    assert await store.list_jobs("default", limit=1) == []


async def test_bad_bodies_are_refused_before_anything_is_queued(running: Running, store: JobStore) -> None:
    for route, body, status, param in CASES:
        await refused(running, store, await running.client.post(f"/v1/{route}", json=body), status, param)


async def test_bad_bytes_are_refused(running: Running, store: JobStore) -> None:
    for route, body, param in RAW:
        await refused(running, store, await running.client.post(f"/v1/{route}", content=body), 400, param)


async def test_a_refusal_of_a_misspelt_field_names_the_right_one(running: Running) -> None:
    answer = await running.client.post("/v1/jobs", json={**JOB, "metdata": {}})
    assert answer.json()["error"]["message"] == "metdata is not a field here; did you mean metadata?"


async def test_a_refusal_of_one_of_few_values_names_them_all(running: Running) -> None:
    tier = await running.client.post("/v1/jobs", json={**JOB, "tier": "gold"})
    assert tier.json()["error"]["message"] == 'tier is "gold"; choose one of interactive, standard, bulk'
    status = await running.client.get("/v1/jobs", params={"status": "done"})
    assert status.status_code == 400
    assert "status" in status.json()["error"]["message"] and "/docs" in status.json()["error"]["message"]


async def test_a_body_over_the_limit_is_413_and_the_connection_lives(running: Running, worker: ScriptedWorker) -> None:
    neighbour = asyncio.create_task(running.client.post("/v1/jobs", json=JOB, headers={"Prefer": "wait=20"}))
    body = json.dumps({**JOB, "input": "x" * 10_000_000}).encode()

    async def pieces() -> Any:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    for content in (body, pieces()):
        answer = await running.client.post("/v1/jobs", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large" and "8388608" in answer.text
    assert (await neighbour).json()["status"] == "succeeded"


async def test_unknown_paths_and_methods_have_the_same_shape(running: Running) -> None:
    for method, path, status, code in (
        ("GET", "/v1/nothing", 404, "not_found"),
        ("PUT", "/v1/jobs", 405, "method_not_allowed"),
        ("GET", "/v1/jobs/job-1-0123456789ab", 404, "job_not_found"),
        ("GET", "/v1/jobs/..%2f..", 404, "not_found"),
        ("POST", "/v1/jobs/xx/cancel", 404, "job_not_found"),
        ("DELETE", "/v1/jobs/job-7-0123456789ab", 404, "job_not_found"),
        ("GET", "/internal/scale/nobody", 404, "model_not_found"),
        ("POST", "/internal/lanes/99/pause", 404, "lane_not_found"),
        ("GET", "/v1/jobs?limit=0", 400, "invalid_request"),
        ("GET", "/v1/jobs?limit=x", 400, "invalid_request"),
        ("GET", "/v1/jobs?after=job-1-0123456789ab", 404, "job_not_found"),
    ):
        answer = await running.client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), path
        assert answer.headers["x-request-id"]
    assert (await running.client.put("/v1/jobs")).headers["allow"] == "GET, OPTIONS, POST"
    assert (await running.client.put("/v1/jobs/x/cancel")).headers["allow"] == "OPTIONS, POST"
    assert (await running.client.post("/v1/models/a/b")).headers["allow"] == "GET, OPTIONS"


async def test_the_context_decides_by_tokens_where_bytes_do_not(running: Running, worker: ScriptedWorker) -> None:
    """The tokenizer makes one token of eight a's: far more bytes than the context fit into it."""
    fits = await running.client.post("/v1/jobs", json={**JOB, "input": "a" * CONTEXT * 4})
    assert fits.status_code == 202
    for num_bytes, max_tokens, expected in (
        (CONTEXT - 1, None, 1),  # room for one token
        (CONTEXT - 1, 1, 1),
        (CONTEXT - 2, 2, 2),
        (CONTEXT - 3, None, 3),
    ):
        params = {} if max_tokens is None else {"max_tokens": max_tokens}
        body = {**JOB, "input": "b" * num_bytes, "params": params}
        job = (await running.client.post("/v1/jobs", json=body, headers={"Prefer": "wait=20"})).json()
        assert job["usage"]["completion_tokens"] == expected, (num_bytes, max_tokens)


async def test_a_tokenizer_that_is_gone_is_a_503_where_it_is_needed(
    running: Running, store: JobStore, card: ModelCard
) -> None:
    gone = msgspec.structs.replace(card, alias="gone", tokenizer_digest="gone", tokenizer_blob="tokenizers/gone")
    await store.put_card(gone)
    answer = await running.client.post("/v1/jobs", json={"model": "gone", "input": "x" * CONTEXT})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_unusable"
    assert (await running.client.post("/v1/jobs", json={"model": "gone", "input": "x"})).status_code == 202


async def test_a_good_job_is_unhurt_among_bad_ones(running: Running, worker: ScriptedWorker) -> None:
    worker.gate.clear()
    good = asyncio.create_task(running.client.post("/v1/jobs", json=JOB, headers={"Prefer": "wait=30"}))
    await until(lambda: bool(worker.claimed))
    for route, body, _, _ in CASES[::4]:
        await running.client.post(f"/v1/{route}", json=body)
    worker.gate.set()
    assert (await good).json()["status"] == "succeeded"


async def test_a_feasible_deadline_is_taken_in_either_form(running: Running, worker: ScriptedWorker) -> None:
    at = int(time.time()) + 600
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    for deadline in (at, float(at), text, text.replace("Z", "+00:00")):
        job = (await running.client.post("/v1/jobs", json={**JOB, "deadline": deadline})).json()
        assert job["deadline"] == at


@pytest.mark.parametrize("wrong_by_seconds", [-3600, 3600])
async def test_deadlines_are_judged_by_the_stores_clock(
    blobs: Blobs, card: ModelCard, settings: GatewaySettings, wrong_by_seconds: int
) -> None:
    """It is the store that will end the job; this machine's clock is wrong by an hour, say."""
    now = int(time.time()) - wrong_by_seconds
    store = MemoryJobs(clock=ManualClock(now * 1000))
    await store.put_card(card)
    async with serving(store, blobs, settings) as running:
        in_time = await running.client.post("/v1/jobs", json={**JOB, "deadline": now + 600})
        too_late = await running.client.post("/v1/jobs", json={**JOB, "deadline": now - 1})
    assert (in_time.status_code, too_late.status_code) == (202, 422), (in_time.text, too_late.text)
    assert datetime.fromtimestamp(now, UTC).isoformat()[:16] in too_late.json()["error"]["message"]
