"""A worker with a real engine (the fake model) over both stores."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from infra.contracts import Job, JobSpec, Kind, Message, NewJob, Result, pack
from infra.keys import new_job_id
from infra.states import TERMINAL, Status
from tests.worker.worker_aids import (
    ENGINE,
    SETTINGS,
    Backend,
    Faults,
    Running,
    checked_log,
    said,
    serving,
    submit,
    the_end,
    told_by,
    undisturbed,
    until,
    until_running,
)
from worker.attempt import Phase

PROMPT = "Once upon a time, there was a queue that lost nothing."


def result_of(job: Job) -> Result:
    assert job.outcome is not None
    assert job.outcome.result is not None
    return job.outcome.result


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 40},
        {"max_tokens": 40, "n": 3, "temperature": 1.0, "seed": 5},
        {"max_tokens": 200, "stop": ["e"]},
        {"max_tokens": 1},
    ],
)
async def test_a_job_ends_with_what_the_engine_says_alone(backend: Backend, params: dict[str, Any]) -> None:
    async with serving(backend):
        job_id = await submit(backend.store, PROMPT, **params)
        job = await the_end(backend.store, job_id)
    assert job.status is Status.SUCCEEDED
    expected = undisturbed(PROMPT, **params)
    assert said(result_of(job).choices) == expected
    assert said(told_by(await checked_log(backend.store, job_id)).values()) == expected
    assert job.outcome is not None
    assert job.outcome.usage.prompt_tokens == len(PROMPT)
    assert job.outcome.usage.completion_tokens == sum(len(token_ids) for token_ids, _, _ in expected)
    assert set(job.outcome.timeline) >= {"queued_seconds", "prefill_seconds", "decode_seconds"}
    assert job.profile is not None
    assert job.profile.startswith("weights=fake-1;")


async def test_messages_are_rendered_with_the_models_template(backend: Backend) -> None:
    async with serving(backend):
        messages = [Message(role="system", content="Be brief."), Message(role="user", content="Hello!")]
        chat = await the_end(backend.store, await submit(backend.store, messages, max_tokens=9))
    rendered = [259, *b"Be brief.", 256, 257, *b"Hello!", 256, 258]
    assert chat.outcome is not None
    assert chat.outcome.usage.prompt_tokens == len(rendered)
    expected = undisturbed(rendered, max_tokens=9)
    assert said(result_of(chat).choices) == expected


async def test_logprobs_are_told_and_kept(backend: Backend) -> None:
    async with serving(backend):
        job_id = await submit(backend.store, "abc", max_tokens=5, logprobs=2, prompt_logprobs=1)
        result = result_of(await the_end(backend.store, job_id))
    (choice,) = result.choices
    assert choice.logprobs is not None
    assert [position.chosen.token_id for position in choice.logprobs] == choice.token_ids
    assert "".join(position.chosen.token for position in choice.logprobs) == choice.text
    assert [len(position.top) for position in choice.logprobs] == [2] * 5
    assert told_by(await checked_log(backend.store, job_id))[0].logprobs == choice.logprobs
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [position and position.chosen.token for position in result.prompt_logprobs] == [None, "b", "c"]


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("x" * 9000, {"max_tokens": 4}, "prompt"),
        ("x", {"temperature": -1.0}, "temperature"),
        ("x", {"tempature": 1.0}, "tempature"),
        ([Message(role="user", content="x")], {"logit_bias": {"400": 1.0}}, "logit_bias"),
        ([400], {}, "prompt"),
    ],
)
async def test_a_bad_job_fails_by_itself(backend: Backend, prompt: Any, params: dict[str, Any], param: str) -> None:
    async with serving(backend):
        good = await submit(backend.store, PROMPT, max_tokens=30)
        bad = await submit(backend.store, prompt, **params)
        failed, succeeded = await the_end(backend.store, bad), await the_end(backend.store, good)
    assert failed.status is Status.FAILED
    assert failed.outcome is not None
    assert failed.outcome.error is not None
    assert (failed.outcome.error.code, failed.outcome.error.param) == ("invalid_request", param)
    assert said(result_of(succeeded).choices) == undisturbed(PROMPT, max_tokens=30)


async def test_large_payloads_go_by_the_blobs(backend: Backend) -> None:
    lane = await backend.store.open_lane("fake")
    params = {"temperature": 0.0, "max_tokens": 500, "logprobs": 20, "n": 2}
    spec = JobSpec(model="fake", kind=Kind.GENERATE, prompt="p" * 3000, params=params)
    job_id = new_job_id(lane)
    backend.blobs.put("specs/one", pack(spec))
    named = msgspec.structs.replace(spec, prompt=None, blob="specs/one")
    await backend.store.submit(NewJob(id=job_id, spec=named, cost_tokens=5000))
    missing = msgspec.structs.replace(spec, prompt=None, blob="specs/none")
    missing_id = new_job_id(lane)
    await backend.store.submit(NewJob(id=missing_id, spec=missing, cost_tokens=5000))
    async with serving(backend):
        job, failed = await the_end(backend.store, job_id), await the_end(backend.store, missing_id)
    assert job.status is Status.SUCCEEDED
    kept = result_of(job)
    assert kept.blob is not None
    assert kept.choices == []
    result = msgspec.msgpack.decode(backend.blobs.get(kept.blob), type=Result)
    assert [len(choice.token_ids) for choice in result.choices] == [500, 500]
    assert told_by(await checked_log(backend.store, job_id)) == {choice.index: choice for choice in result.choices}
    assert failed.outcome is not None
    assert failed.outcome.error is not None
    assert failed.outcome.error.code == "payload_missing"


async def test_many_jobs_share_steps_and_calls(backend: Backend) -> None:
    faults = Faults()
    async with serving(backend.with_faults(faults)) as running:
        ids = {}
        for number in range(24):
            prompt = f"{number}: {PROMPT}"
            ids[await submit(backend.store, prompt, max_tokens=20 + number, n=1 + number % 2)] = (number, prompt)
        for job_id, (number, prompt) in ids.items():
            job = await the_end(backend.store, job_id)
            assert said(result_of(job).choices) == undisturbed(prompt, max_tokens=20 + number, n=1 + number % 2)
        await until(lambda: not running.bridge.attempts)
        assert running.worker.stats.num_held_blocks == 0
        num_tokens = running.worker.stats.num_generated_tokens
    assert faults.calls["commit"] == 24
    assert faults.calls["publish"] < num_tokens / 4


async def most_sequences(backend: Backend, running: Running, ids: list[str]) -> int:
    """The most sequences that were in the engine, or on their way to it, until all jobs have ended."""
    most = 0
    for job_id in ids:
        while (job := await backend.store.get(job_id)) is not None and job.status not in TERMINAL:
            in_engine = [a for a in running.bridge.attempts.values() if a.phase in (Phase.STARTING, Phase.RUNNING)]
            most = max(most, sum(attempt.num_sequences for attempt in in_engine))
            await asyncio.sleep(0.001)
    return most


async def test_no_more_is_claimed_than_the_engine_has_seats_for(backend: Backend) -> None:
    async with serving(backend, engine=replace(ENGINE, max_num_seqs=3)) as running:
        ids = [await submit(backend.store, PROMPT, max_tokens=25, cost_tokens=1) for _ in range(9)]
        assert await most_sequences(backend, running, ids) == 3


async def test_what_does_not_fit_beside_others_waits_until_it_is_alone(backend: Backend) -> None:
    async with serving(backend, engine=replace(ENGINE, num_kv_blocks=16)) as running:  # 256 tokens
        small = await submit(backend.store, PROMPT, max_tokens=60, cost_tokens=120)
        await until_running(backend, small)
        large = await submit(backend.store, "l" * 100, max_tokens=100, cost_tokens=250)
        assert await most_sequences(backend, running, [small, large]) == 1
        assert (await the_end(backend.store, large)).status is Status.SUCCEEDED


async def test_a_cancelled_job_leaves_the_engine(backend: Backend) -> None:
    async with serving(backend) as running:
        cancelled = await submit(backend.store, PROMPT, max_tokens=4000, n=4)
        other = await submit(backend.store, PROMPT, max_tokens=60)
        await until_running(backend, cancelled, num_events=5)
        await backend.store.cancel(cancelled)
        assert running.bridge.attempts
        assert said(result_of(await the_end(backend.store, other)).choices) == undisturbed(PROMPT, max_tokens=60)
        await until(lambda: not running.bridge.attempts)
        await until(lambda: running.worker.stats.num_requests == 0)
        assert running.worker.stats.num_held_blocks == 0
        assert running.worker.stats.num_generated_tokens < 4000
    job = await the_end(backend.store, cancelled)
    assert job.status is Status.CANCELLED
    told = told_by(await checked_log(backend.store, cancelled))
    assert job.outcome is not None
    assert job.outcome.usage.completion_tokens == sum(len(choice.token_ids) for choice in told.values()) > 0
    for index, (token_ids, text, _) in enumerate(undisturbed(PROMPT, max_tokens=4000, n=4)):
        assert token_ids[: len(told[index].token_ids)] == told[index].token_ids
        assert text.startswith(told[index].text)


async def test_a_drain_finishes_what_fits(backend: Backend) -> None:
    async with serving(backend) as running:
        ids = [await submit(backend.store, PROMPT, max_tokens=50) for _ in range(3)]
        for job_id in ids:
            await until_running(backend, job_id)
        assert await running.stop() is True
        for job_id in ids:
            job = await backend.store.get(job_id)
            assert job is not None
            assert (job.status, job.attempt) == (Status.SUCCEEDED, 1)
        late = await submit(backend.store, PROMPT, max_tokens=5)
        await asyncio.sleep(0.05)
        job = await backend.store.get(late)
        assert job is not None
        assert job.status is Status.QUEUED


@pytest.mark.parametrize("params", [{}, {"n": 2, "temperature": 1.0, "seed": 3}, {"n": 2, "logprobs": 1, "fake": 1}])
async def test_what_does_not_fit_is_handed_over_and_goes_on_exactly(backend: Backend, params: dict[str, Any]) -> None:
    engine = replace(ENGINE, fake_seconds_per_step=0.006)
    if params.pop("fake", None):  # choices of different lengths: some have ended when it is handed over
        engine = replace(engine, fake_eos_every=200)
        params.update(temperature=1.0, n=6)
    ask = {"max_tokens": 150, "min_tokens": 1, **params}
    async with serving(backend, settings=replace(SETTINGS, drain_seconds=0.0), engine=engine) as first:
        ids = [await submit(backend.store, f"{number} {PROMPT}", **ask) for number in range(2)]
        for job_id in ids:
            await until_running(backend, job_id, num_events=12)
        assert await first.stop() is True
    for job_id in ids:
        job = await backend.store.get(job_id)
        assert job is not None
        assert (job.status, job.attempt, job.lost_count) == (Status.QUEUED, 1, 0)
    async with serving(backend, engine=engine) as second:
        for number, job_id in enumerate(ids):
            job = await the_end(backend.store, job_id)
            expected = undisturbed(f"{number} {PROMPT}", engine=engine, **ask)
            assert said(result_of(job).choices) == expected
            log = await checked_log(backend.store, job_id)
            assert list(told_by(log).values()) == result_of(job).choices
            assert [event.body.reason for event in log if event.type == "job.requeued"] == ["hand_over"]
            assert job.outcome is not None
            assert job.outcome.usage.completion_tokens == sum(len(token_ids) for token_ids, _, _ in expected)
            assert job.outcome.usage.prompt_tokens == len(f"{number} {PROMPT}")
            assert sum(event.body.num_prompt_tokens is not None for event in log) == 1
            if engine.fake_eos_every:
                assert len({len(token_ids) for token_ids, _, _ in expected}) > 1
        num_tokens = first.worker.stats.num_generated_tokens + second.worker.stats.num_generated_tokens
    assert num_tokens == sum(
        len(ids) for n in range(2) for ids, _, _ in undisturbed(f"{n} {PROMPT}", engine=engine, **ask)
    )


async def test_the_store_may_be_away_for_a_while(backend: Backend) -> None:
    faults = Faults()
    async with serving(backend.with_faults(faults)) as running:
        ids = [await submit(backend.store, f"{number} {PROMPT}", max_tokens=150) for number in range(3)]
        for job_id in ids:
            await until_running(backend, job_id)
        faults.is_away = True
        await until(lambda: running.worker.stats.num_requests == 0)
        assert len(running.bridge.attempts) == 3
        faults.lose_replies.update(publish=1, commit=3)
        faults.is_away = False
        for number, job_id in enumerate(ids):
            job = await the_end(backend.store, job_id)
            assert said(result_of(job).choices) == undisturbed(f"{number} {PROMPT}", max_tokens=150)
            assert said(told_by(await checked_log(backend.store, job_id)).values()) == said(result_of(job).choices)
        late = await submit(backend.store, PROMPT, max_tokens=5)
        assert (await the_end(backend.store, late)).status is Status.SUCCEEDED
        await until(lambda: not running.bridge.attempts)
