"""The real openai SDK as the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from infra.states import Status
from infra.store import JobStore
from tests.gateway.gateway_aids import ALIAS, Running
from tests.gateway.scripted import ScriptedWorker, text_of, until

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def sdk(running: Running) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def test_models(sdk: AsyncOpenAI) -> None:
    models = [model async for model in sdk.models.list()]
    assert [(model.id, model.owned_by) for model in models] == [(ALIAS, "millstream")]
    assert (await sdk.models.retrieve(ALIAS)).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError) as refused:
        await sdk.models.retrieve("some/where")
    assert refused.value.code == "model_not_found"


async def test_chat(sdk: AsyncOpenAI, worker: ScriptedWorker, store: JobStore) -> None:
    answer = await sdk.chat.completions.create(
        model=ALIAS, messages=HELLO, max_completion_tokens=4, n=2, seed=7, service_tier="flex", user="u", store=True,
        logprobs=True, top_logprobs=2, metadata={"a": "b"}, temperature=0.5, stop=["x"], logit_bias={"5": -1},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    choice = answer.choices[1]
    assert choice.message.role == "assistant" and choice.message.content == text_of(4)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [one.token for one in choice.logprobs.content] == ["alpha", " beta", " gamma", " délta"]
    assert [top.logprob for top in choice.logprobs.content[0].top_logprobs] == [-0.25, -9999.0]
    assert answer.object == "chat.completion" and answer.model == ALIAS
    assert answer.service_tier == "flex"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.system_fingerprint is not None
    # The answer is a view on a job, whose id it carries.
    job = await store.get(answer.id.removeprefix("chatcmpl-"))
    assert job is not None and job.tier == "bulk" and job.spec.metadata == {"a": "b"}
    assert job.spec.params == {
        "n": 2, "max_tokens": 4, "seed": 7, "temperature": 0.5, "stop": ["x"], "logprobs": 2, "logit_bias": {5: -1.0},
    }  # fmt: skip


async def test_chat_stream(sdk: AsyncOpenAI, worker: ScriptedWorker) -> None:
    stream = await sdk.chat.completions.create(
        model=ALIAS, messages=HELLO, max_tokens=5, n=2, stream=True, stream_options={"include_usage": True},
        logprobs=True,
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index in (0, 1):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert parts[0].delta.role == "assistant"
        assert all(part.delta.role is None for part in parts[1:])
        assert "".join(part.delta.content or "" for part in parts) == text_of(5)
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
        tokens = [one.token for part in parts if part.logprobs for one in part.logprobs.content or []]
        assert "".join(tokens) == text_of(5)


async def test_stream_and_blocking_agree(sdk: AsyncOpenAI, worker: ScriptedWorker) -> None:
    whole = await sdk.chat.completions.create(model=ALIAS, messages=HELLO)
    stream = await sdk.chat.completions.create(model=ALIAS, messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


async def test_completions_of_every_kind_of_prompt(sdk: AsyncOpenAI, worker: ScriptedWorker) -> None:
    for prompt, num_prompts, prompt_tokens in (
        ("hello", 1, 5), (["a", "bc"], 2, 3), ([1, 2, 3], 1, 3), ([[1, 2], [3]], 2, 3),
    ):  # fmt: skip
        answer = await sdk.completions.create(model=ALIAS, prompt=prompt, n=2, max_tokens=3)
        assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
        assert all(choice.text == text_of(3) for choice in answer.choices)
        assert answer.usage is not None and answer.usage.prompt_tokens == prompt_tokens
        assert answer.usage.completion_tokens == 6 * num_prompts


async def test_completion_default_and_logprobs(sdk: AsyncOpenAI, worker: ScriptedWorker) -> None:
    answer = await sdk.completions.create(model=ALIAS, prompt="hello", logprobs=1)
    assert answer.usage is not None and answer.usage.completion_tokens == 16  # OpenAI's default
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert logprobs.text_offset is not None and logprobs.text_offset[:3] == [0, 5, 10]
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"alpha": -0.25}


async def test_completion_stream_of_several_prompts(sdk: AsyncOpenAI, worker: ScriptedWorker) -> None:
    stream = await sdk.completions.create(
        model=ALIAS, prompt=["a", "b", "c"], n=2, max_tokens=4, stream=True, logprobs=1,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    for index in range(6):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(part.text for part in parts) == text_of(4)
        assert [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset or []] == [
            0, 5, 10, 16,
        ]  # fmt: skip
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24


async def test_errors_become_the_sdks_exceptions(sdk: AsyncOpenAI, worker: ScriptedWorker) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.chat.completions.create(model="nobody", messages=HELLO)
    assert unknown.value.param == "model" and unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model=ALIAS, messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.request_id
    with pytest.raises(openai.InternalServerError) as failed:
        await sdk.chat.completions.create(model=ALIAS, messages=[{"role": "user", "content": "FAIL"}])
    assert failed.value.code == "engine_error" and failed.value.response.headers["x-should-retry"] == "false"
    stream = await sdk.chat.completions.create(model=ALIAS, messages=[{"role": "user", "content": "FAIL"}], stream=True)
    with pytest.raises(openai.APIError) as broken:
        _ = [chunk async for chunk in stream]
    assert broken.value.code == "engine_error"


async def test_one_failed_prompt_fails_the_request_and_cancels_the_others(
    sdk: AsyncOpenAI, worker: ScriptedWorker, store: JobStore
) -> None:
    worker.gate.clear()  # the good one would run for ever
    for stream in (False, True):
        with pytest.raises(openai.APIError) as failed:
            answer = await sdk.completions.create(model=ALIAS, prompt=["good", "FAIL"], stream=stream)
            async for _ in answer:  # type: ignore[union-attr]
                pass
        assert failed.value.code == "engine_error"
        [job] = [job for job in await store.list_jobs("default", limit=2) if job.spec.prompt == "good"]
        await until_status(store, job.id, Status.CANCELLED)


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_cancels_the_job(
    sdk: AsyncOpenAI, worker: ScriptedWorker, store: JobStore, stream: bool
) -> None:
    worker.gate.clear()
    worker.hold_at = 2

    async def ask() -> None:
        answer = await sdk.chat.completions.create(model=ALIAS, messages=HELLO, stream=stream)
        async for _ in answer:  # type: ignore[union-attr]
            pass

    asking = asyncio.create_task(ask())
    await until(lambda: worker.num_tokens_emitted >= 2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until_status(store, worker.claimed[0], Status.CANCELLED)


async def test_a_second_client_of_the_same_job_keeps_it(
    sdk: AsyncOpenAI, worker: ScriptedWorker, store: JobStore
) -> None:
    worker.gate.clear()

    async def ask() -> str | None:
        answer = await sdk.chat.completions.create(
            model=ALIAS, messages=HELLO, extra_headers={"Idempotency-Key": "same"}
        )
        return answer.choices[0].message.content

    first, second = asyncio.create_task(ask()), asyncio.create_task(ask())
    await until(lambda: bool(worker.claimed))
    await asyncio.sleep(0.1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.sleep(0.1)
    worker.gate.set()
    assert await second == text_of(6)
    assert len(worker.claimed) == 1


async def test_shutdown_lets_answers_finish_and_cancels_nothing(
    running: Running, sdk: AsyncOpenAI, worker: ScriptedWorker, store: JobStore
) -> None:
    worker.gate.clear()
    finishing = asyncio.create_task(sdk.chat.completions.create(model=ALIAS, messages=HELLO))
    await until(lambda: bool(worker.claimed))
    running.server.should_exit = True
    await until(lambda: running.gateway.is_closing)
    worker.gate.set()
    assert (await finishing).choices[0].message.content == text_of(6)


async def test_shutdown_names_the_job_of_an_answer_that_takes_too_long(
    running: Running, sdk: AsyncOpenAI, worker: ScriptedWorker, store: JobStore
) -> None:
    worker.gate.clear()
    asking = asyncio.create_task(sdk.chat.completions.create(model=ALIAS, messages=HELLO))
    streaming = await sdk.chat.completions.create(model=ALIAS, messages=HELLO, stream=True)
    await until(lambda: len(worker.claimed) >= 2)
    running.server.should_exit = True
    with pytest.raises(openai.APIError) as cut:
        async for _ in streaming:
            pass
    assert cut.value.code == "gateway_closing"
    with pytest.raises(openai.InternalServerError) as refused:
        await asking
    assert refused.value.status_code == 503 and any(job_id in refused.value.message for job_id in worker.claimed)
    worker.gate.set()
    for job_id in worker.claimed:
        await until_status(store, job_id, Status.SUCCEEDED)


async def until_status(store: JobStore, job_id: str, status: Status) -> None:
    for _ in range(1000):
        job = await store.get(job_id)
        assert job is not None
        if job.status is status:
            return
        assert job.status in (Status.QUEUED, Status.RUNNING)
        await asyncio.sleep(0.01)
    raise AssertionError(f"{job_id} has not become {status}")
