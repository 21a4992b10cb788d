"""A request goes in, exact tokens come out, whatever is killed or sent beside it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import openai
import pytest
from standardwebhooks.webhooks import Webhook

from infra.jobs import RedisJobs
from millstream import Client
from millstream.stack.child import Child
from millstream.stack.stack import Stack
from tests.e2e.conftest import MODEL, WEBHOOK_SECRET
from tests.webhooks.listener import Listener, status

pytestmark = pytest.mark.real_model

STORY = "Write a long story about a mill at a stream, its miller, and the seasons."


@pytest.fixture
def client(stack: Stack) -> Client:
    return Client(stack.url, timeout_seconds=60)


def worker_of(stack: Stack, job_id: str) -> Child:
    """The worker process that runs a job now."""

    async def owner() -> str | None:
        assert stack.store.redis_url is not None
        jobs = await RedisJobs.connect(stack.store.redis_url)
        try:
            job = await jobs.get(job_id)
            assert job is not None
            return job.owner
        finally:
            await jobs.close()

    owned_by = asyncio.run(owner())
    assert owned_by is not None
    for child in stack.children:
        if child.pid is not None and f"-{child.pid}-" in owned_by:
            return child
    raise AssertionError(f"{owned_by} is no worker of the stack")


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"temperature": 0.0}, id="greedy"),
        pytest.param({"temperature": 1.0, "seed": 7, "n": 2, "presence_penalty": 0.5}, id="seeded-n2-penalty"),
    ],
)
def test_a_stream_survives_the_death_of_its_worker(stack: Stack, client: Client, params: dict[str, Any]) -> None:
    params = {**params, "max_tokens": 220, "ignore_eos": True}
    undisturbed = client.submit(STORY, model=MODEL, params=params).result(180)

    job = client.submit(STORY, model=MODEL, params=params)
    numbers, attempts, texts = [], set(), ["", ""]
    is_killed = False
    for event in job.stream():
        numbers.append(event.sequence_number)
        if event.attempt:
            attempts.add(event.attempt)
        for delta in event.deltas or []:
            texts[delta.index] += delta.text
        if not is_killed and len(texts[0]) > 60:
            victim = worker_of(stack, job.id).pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            is_killed = True
    assert is_killed
    assert numbers == list(range(len(numbers)))
    assert max(attempts) >= 2, "the job was not disturbed"
    assert texts[: len(undisturbed.choices)] == [choice.text for choice in undisturbed.choices]
    done = job.get()
    assert done.status == "succeeded"
    assert done.result is not None
    assert [c.token_ids for c in done.result.choices] == [c.token_ids for c in undisturbed.choices]
    assert done.usage is not None
    assert done.usage.completion_tokens == 220 * len(undisturbed.choices)


def test_openai_clients_get_the_same_text_blocking_and_streaming(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as sdk:
        assert MODEL in [model.id for model in sdk.models.list()]
        ask: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Name three colours. 🙂 日本語?"}],
            "temperature": 0.8,
            "seed": 11,
            "max_tokens": 40,
        }
        blocking = sdk.chat.completions.create(**ask)
        chunks = list(sdk.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert blocking.choices[0].message.content == streamed
        assert blocking.usage is not None
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == blocking.usage.total_tokens
        completion = sdk.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0)
        assert "Paris" in completion.choices[0].text
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            sdk.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "x"}])


GOOD = {
    "model": MODEL,
    "input": "One fish, two fish,",
    "params": {"max_tokens": 60, "temperature": 0, "ignore_eos": True},
}
BAD: list[tuple[str, bytes | dict[str, Any], int, str | None]] = [
    ("unknown model", {**GOOD, "model": "gpt-17"}, 404, "model"),
    ("NaN temperature, raw", json.dumps({**GOOD, "params": {"temperature": float("nan")}}).encode(), 400, None),
    ("NaN temperature, text", {**GOOD, "params": {"temperature": "nan"}}, 400, "temperature"),
    ("temperature below 0", {**GOOD, "params": {"temperature": -1}}, 400, "temperature"),
    ("empty prompt", {**GOOD, "input": ""}, 400, "input"),
    ("10 MB body", {**GOOD, "input": "x" * 10_000_000}, 413, None),
    ("invalid JSON", b'{"model": "smollm2-135m", "input":', 400, None),
    ("prompt over context", {**GOOD, "input": "word " * 20_000}, 400, "input"),
]


@pytest.mark.parametrize(("kind", "body", "code", "param"), BAD, ids=[bad[0] for bad in BAD])
def test_bad_input_is_refused_by_name_and_hurts_nobody(
    stack: Stack, client: Client, kind: str, body: bytes | dict[str, Any], code: int, param: str | None
) -> None:
    good = client.submit(GOOD["input"], model=MODEL, params=GOOD["params"])
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(
        f"{stack.url}/v1/jobs", content=content, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == code, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert param in (error["param"] or "")
    assert good.result(120).choices[0].finish_reason == "length"


async def test_a_webhook_arrives_once_signed_though_the_dispatcher_dies(stack: Stack, client: Client) -> None:
    dispatcher = next(child for child in stack.children if child.spec.name == "dispatcher")

    def kill_dispatcher() -> None:
        assert dispatcher.pid is not None
        os.kill(dispatcher.pid, signal.SIGKILL)

    async with Listener(status(500), status(500), status(200)) as listener:
        job = await asyncio.to_thread(
            client.submit, "Hello", model=MODEL, params={"max_tokens": 20}, webhook={"url": listener.url}
        )
        await asyncio.to_thread(kill_dispatcher)
        await asyncio.to_thread(job.result, 120)
        received = await listener.wait_for(3, timeout=60)
        for one in received:
            told = Webhook(WEBHOOK_SECRET).verify(one.body, one.headers)
            assert (told["type"], told["data"]["id"]) == ("job.succeeded", job.id)
        assert len({one.headers["webhook-id"] for one in received}) == 1
