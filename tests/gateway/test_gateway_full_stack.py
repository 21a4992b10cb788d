"""The gateway with real workers, in processes of their own, that run the deterministic stand-in for a model."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from infra.jobs import RedisJobs
from infra.settings import GatewaySettings
from tests.gateway.gateway_aids import Running, serving

PROGRAM = """
import json, sys
from engine import EngineConfig
from infra.settings import StoreSettings, WorkerSettings
from worker.main import run
url, blobs, engine = sys.argv[1:]
settings = WorkerSettings(model="fake", lease_seconds=2, renew_seconds=0.5, drain_seconds=5)
sys.exit(run(StoreSettings(redis_url=url, blob_url=blobs), settings, EngineConfig(**json.loads(engine))))
"""
MODEL = "fake"
READY_SECONDS = 60


@asynccontextmanager
async def worker_process(redis_url: str, blob_url: str, **engine: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A ready worker; whatever becomes of it, it is gone afterwards."""
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, redis_url, blob_url, json.dumps(engine), cwd=root,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(READY_SECONDS):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("worker ready"), line
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def stack(
    redis_url: str, tmp_path: Path, settings: GatewaySettings
) -> AsyncIterator[tuple[Running, Callable[..., Any]]]:
    """A gateway, and what starts workers for it."""
    from infra.blobs import open_blobs

    blob_url = (tmp_path / "blobs").as_uri()
    store = await RedisJobs.connect(redis_url)
    async with serving(store, open_blobs(blob_url), replace(settings, default_max_tokens=64)) as running:
        yield running, lambda **engine: worker_process(redis_url, blob_url, **engine)
    await store.close()


def sdk_of(running: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


async def test_real_worker_answers_every_route_alike(stack: tuple[Running, Callable[..., Any]]) -> None:
    running, worker = stack
    async with worker(), sdk_of(running) as sdk:
        assert (await running.client.get("/readyz")).status_code == 200
        messages: Any = [{"role": "user", "content": "Tell me. 🙂"}]
        fields: Any = {"model": MODEL, "messages": messages, "max_tokens": 12, "n": 2, "seed": 5, "logprobs": True,
                       "top_logprobs": 2}  # fmt: skip
        whole = await sdk.chat.completions.create(**fields)
        stream = await sdk.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        body = {"model": MODEL, "input": messages, "params": {"max_tokens": 12, "n": 2, "seed": 5, "logprobs": 2}}
        job = (await running.client.post("/v1/jobs", json=body, headers={"Prefer": "wait=20"})).json()
        for index in (0, 1):
            parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            streamed = "".join(part.delta.content or "" for part in parts)
            choice = whole.choices[index]
            assert choice.message.content == streamed == job["result"]["choices"][index]["text"]
            assert choice.finish_reason == job["result"]["choices"][index]["finish_reason"]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            tokens = [one for part in parts if part.logprobs for one in part.logprobs.content or []]
            assert [one.logprob for one in tokens] == [one.logprob for one in choice.logprobs.content]
        assert whole.choices[0].message.content != whole.choices[1].message.content
        assert whole.usage is not None and chunks[-1].usage is not None
        assert whole.usage.total_tokens == chunks[-1].usage.total_tokens == job["usage"]["total_tokens"]
        timeline = (await running.client.get(f"/v1/jobs/{job['id']}/timeline")).json()
        assert timeline["engine"]["decode_seconds"] > 0
        # A prompt of plain text and one of its token ids are the same prompt.
        text = await sdk.completions.create(model=MODEL, prompt="abc", max_tokens=5, temperature=0)
        assert text.usage is not None and text.usage.completion_tokens == 5


async def test_the_stream_goes_on_over_a_killed_worker(stack: tuple[Running, Callable[..., Any]]) -> None:
    """The client notices nothing but a pause: the same events, numbered without a gap, and the undisturbed text."""
    running, worker = stack
    body = {"model": MODEL, "input": "go on", "params": {"max_tokens": 60, "seed": 3, "n": 2}}
    async with worker(fake_seconds_per_step=0.02) as first:
        undisturbed = (await running.client.post("/v1/jobs", json=body, headers={"Prefer": "wait=30"})).json()
        job = (await running.client.post("/v1/jobs", json=body)).json()
        seen: list[dict[str, Any]] = []
        async with running.client.stream("GET", f"/v1/jobs/{job['id']}/events") as answer:
            async with asyncio.timeout(30):
                lines = answer.aiter_lines()
                while sum(len(event.get("deltas", [])) for event in seen) < 10:
                    line = await anext(lines)
                    seen += [json.loads(line[6:])] if line.startswith("data: ") else []
                first.send_signal(signal.SIGKILL)
                async with worker():
                    async for line in lines:
                        seen += [json.loads(line[6:])] if line.startswith("data: ") else []
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    assert [event["type"] for event in seen if event["type"] == "job.requeued"] == ["job.requeued"]
    assert seen[-1]["type"] == "job.succeeded"
    for index in (0, 1):
        deltas = [delta for event in seen for delta in event.get("deltas", []) if delta["index"] == index]
        assert "".join(delta.get("text", "") for delta in deltas) == undisturbed["result"]["choices"][index]["text"]


async def test_hanging_up_frees_the_worker(stack: tuple[Running, Callable[..., Any]]) -> None:
    running, worker = stack
    async with worker(fake_seconds_per_step=0.02, max_num_seqs=1), sdk_of(running) as sdk:
        messages: Any = [{"role": "user", "content": "x"}]
        stream = await sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=3000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        # The only place is free again, long before 3,000 tokens would have been drawn.
        async with asyncio.timeout(20):
            await sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
        [_, hung_up] = (await running.client.get("/v1/jobs")).json()["data"]
        assert hung_up["status"] == "cancelled"


async def test_outputs_have_the_shape_that_was_asked_for(stack: tuple[Running, Callable[..., Any]]) -> None:
    """By every field that asks for one, streamed or whole; the fake model keeps to grammars, too."""
    running, worker = stack
    properties = {"n": {"enum": [1, 22]}, "ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["n", "ok"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    async with worker(), sdk_of(running) as sdk:
        fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "seed": 3, "max_tokens": 60}
        whole = await sdk.chat.completions.create(**fields, response_format=wanted)
        assert whole.choices[0].finish_reason == "stop"
        answer = json.loads(whole.choices[0].message.content or "")
        assert answer["n"] in (1, 22) and isinstance(answer["ok"], bool) and len(answer) == 2
        streamed = ""
        async for chunk in await sdk.chat.completions.create(**fields, response_format=wanted, stream=True):
            streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert streamed == whole.choices[0].message.content
        chosen = await sdk.completions.create(
            model=MODEL, prompt="x", max_tokens=60, n=3, seed=1, extra_body={"guided_choice": ["left", "right"]}
        )
        assert all(choice.text in ("left", "right") for choice in chosen.choices)
        job = await running.client.post(
            "/v1/jobs?wait=30",
            json={
                "model": MODEL,
                "kind": "generate",
                "input": "x",
                "params": {"guided": {"regex": "[ab]{3}c"}, "max_tokens": 9},
            },
        )
        text = (await running.client.get(f"/v1/jobs/{job.json()['id']}?wait=30")).json()["result"]["choices"][0]["text"]
        assert len(text) == 4 and set(text[:3]) <= {"a", "b"} and text[3] == "c"
