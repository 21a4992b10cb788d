"""What a worker does when its engine, its blobs or its claims go wrong. Real parts with faults put in between."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine import LLM, EngineConfig
from engine.config import LoadedModel
from engine.errors import DeviceFailed
from engine.fake_runner import FakeRunner, load_fake
from engine.plan import Plan, StepResult
from infra.blobs import Blobs, BlobUnavailable
from infra.clock import ManualClock
from infra.contracts import JobSpec, Kind, NewJob, Result, pack
from infra.keys import new_job_id
from infra.memory import MemoryJobs
from infra.states import Status
from infra.telemetry import Telemetry
from tests.worker.worker_aids import (
    ENGINE,
    SETTINGS,
    Backend,
    Faults,
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
from worker import payloads, retry, service, watchdog
from worker.card import profile_of

PROMPT = "Whatever can fail fails once, and what cannot fail fails twice."


class FaultyRunner(FakeRunner):
    """Calls `fault` before each step with its number."""

    def __init__(self, config: EngineConfig, fault: Callable[[int, Plan], None]) -> None:
        super().__init__(config)
        self._fault = fault
        self._num_steps = 0

    def execute(self, plan: Plan) -> StepResult:
        if plan.rows:
            self._num_steps += 1
            self._fault(self._num_steps, plan)
        return super().execute(plan)


def faulty(fault: Callable[[int, Plan], None], config: EngineConfig = ENGINE) -> Callable[[], LLM]:
    def load() -> LLM:
        loaded = load_fake(config)
        return LLM(
            LoadedModel(runner=FaultyRunner(config, fault), tokenizer=loaded.tokenizer, info=loaded.info), config
        )

    return load


async def assert_undisturbed(backend: Backend, job_id: str, prompt: str, **params: Any) -> None:
    job = await the_end(backend.store, job_id)
    assert job.status is Status.SUCCEEDED
    assert job.outcome is not None
    assert job.outcome.result is not None
    assert said(job.outcome.result.choices) == undisturbed(prompt, **params)
    assert said(told_by(await checked_log(backend.store, job_id)).values()) == undisturbed(prompt, **params)


async def test_a_broken_device_gives_every_job_back_and_ends_the_worker(backend: Backend) -> None:
    def fault(number: int, plan: Plan) -> None:
        if number == 30:
            raise DeviceFailed("the device is lost")

    async with serving(backend, load=faulty(fault)) as running:
        ids = [await submit(backend.store, f"{number} {PROMPT}", max_tokens=90) for number in range(3)]
        assert await running.served is False
    jobs = [await backend.store.get(job_id) for job_id in ids]
    assert [(job.status, job.attempt, job.lost_count) for job in jobs if job] == [(Status.QUEUED, 1, 0)] * 3
    async with serving(backend):
        for number, job_id in enumerate(ids):
            await assert_undisturbed(backend, job_id, f"{number} {PROMPT}", max_tokens=90)


async def test_a_forward_that_fails_for_one_request_fails_that_job_alone(backend: Backend) -> None:
    def fault(number: int, plan: Plan) -> None:
        if any(bytes(row.sequence.prompt_token_ids).startswith(b"bad") for row in plan.rows):
            raise ValueError("no such kernel")

    async with serving(backend, load=faulty(fault)):
        good = await submit(backend.store, PROMPT, max_tokens=60)
        bad = await submit(backend.store, "bad", max_tokens=60)
        await assert_undisturbed(backend, good, PROMPT, max_tokens=60)
        failed = await the_end(backend.store, bad)
    assert failed.status is Status.FAILED
    assert failed.outcome is not None
    assert failed.outcome.error is not None
    assert failed.outcome.error.code == "generation_error"
    assert "no such kernel" in failed.outcome.error.message


async def test_a_hung_engine_loses_its_jobs_to_another_worker(backend: Backend) -> None:
    released = threading.Event()

    def fault(number: int, plan: Plan) -> None:
        if number == 20:
            released.wait(60)

    settings = replace(SETTINGS, lease_seconds=0.6, renew_seconds=0.1, stall_seconds=0.5)
    async with serving(backend, settings=settings, load=faulty(fault)) as hung:
        job_id = await submit(backend.store, PROMPT, max_tokens=80)
        await until_running(backend, job_id)
        async with serving(backend) as other:
            await assert_undisturbed(backend, job_id, PROMPT, max_tokens=80)
            await until(lambda: not other.bridge.attempts)
        job = await backend.store.get(job_id)
        assert job is not None
        assert (job.attempt, job.lost_count) == (2, 1)
        released.set()
        await until(lambda: hung.served.done() or not hung.bridge.attempts)
    assert len([event for event in await checked_log(backend.store, job_id) if event.is_last]) == 1


async def test_an_engine_that_hangs_for_good_ends_its_worker(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ENGINE_STOP_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.1)
    released = threading.Event()
    settings = replace(SETTINGS, lease_seconds=0.6, renew_seconds=0.1, stall_seconds=0.5)
    async with serving(backend, settings=settings, load=faulty(lambda number, plan: released.wait(60) or None)) as hung:
        await submit(backend.store, PROMPT, max_tokens=80)
        try:
            assert await hung.served is False
            assert hung.worker.is_stuck
        finally:
            released.set()
            await until(lambda: all(thread.name != "engine" for thread in threading.enumerate()))


async def test_a_job_that_may_kill_workers_has_its_worker_to_itself() -> None:
    """Two jobs have lost two workers each: each runs alone, and neither they nor the others wait for ever."""
    clock = ManualClock()
    store = MemoryJobs(clock=clock)

    async def another() -> MemoryJobs:
        return store.another()

    backend = Backend(store, another, _NoBlobs())
    suspects = [await submit(store, f"{number} {PROMPT}", max_tokens=80) for number in range(2)]
    (lane,) = await store.lanes("fake")
    for _ in range(2):
        for _ in suspects:
            assert await store.claim(lane, "dies", free_tokens=None, lease_seconds=1.0)
        clock.advance(seconds=2)
    others = [await submit(store, f"{number} {PROMPT}", max_tokens=80) for number in range(2, 4)]
    seen: set[frozenset[str]] = set()
    async with serving(backend) as running:
        for job_id in suspects + others:
            while (job := await store.get(job_id)) is not None and job.status in (Status.QUEUED, Status.RUNNING):
                seen.add(frozenset(attempt.job.id for attempt in running.bridge.attempts.values()))
                await asyncio.sleep(0.001)
        for number, job_id in enumerate(suspects + others):
            await assert_undisturbed(backend, job_id, f"{number} {PROMPT}", max_tokens=80)
    assert {together for together in seen if together & set(suspects)} == {frozenset([one]) for one in suspects}
    assert any(set(others) <= together for together in seen)
    assert await store.dead_letters(lane) == []


class _NoBlobs:
    """Blobs that are away for the first `num_failures` calls of each kind."""

    def __init__(self, blobs: Blobs | None = None, num_failures: int = 0) -> None:
        self._blobs = blobs
        self._left = {"get": num_failures, "put": num_failures}

    def exists(self, key: str) -> bool:
        return True

    def _strike(self, verb: str) -> Blobs:
        self._left[verb] -= 1
        if self._blobs is None or self._left[verb] >= 0:
            raise BlobUnavailable
        return self._blobs

    def get(self, key: str) -> bytes:
        return self._strike("get").get(key)

    def put(self, key: str, data: bytes) -> None:
        self._strike("put").put(key, data)


async def test_payloads_are_tried_again(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = retry.RULES[retry.Failure.PAYLOAD]
    monkeypatch.setitem(retry.RULES, retry.Failure.PAYLOAD, replace(rule, first_delay_seconds=0.01, factor=1.0))
    monkeypatch.setattr(payloads, "LARGE_BYTES", 1000)
    lane = await backend.store.open_lane("fake")
    params = {"temperature": 0.0, "max_tokens": 60, "logprobs": 20}
    spec = JobSpec(model="fake", kind=Kind.GENERATE, prompt=PROMPT, params=params)
    backend.blobs.put("specs/one", pack(spec))
    job_id = new_job_id(lane)
    named = msgspec.structs.replace(spec, prompt=None, blob="specs/one")
    await backend.store.submit(NewJob(id=job_id, spec=named, cost_tokens=500))
    bad = replace(backend, blobs=_NoBlobs(backend.blobs, num_failures=3))
    async with serving(bad):
        job = await the_end(backend.store, job_id)
    assert job.status is Status.SUCCEEDED
    assert job.attempt == 4  # three times its request could not be read; its result was put within the last
    assert job.outcome is not None
    assert job.outcome.result is not None
    assert job.outcome.result.blob is not None
    result = msgspec.msgpack.decode(backend.blobs.get(job.outcome.result.blob), type=Result)
    assert len(result.choices[0].token_ids) == 60


async def test_payloads_that_stay_away_fail_the_job(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(retry.RULES, retry.Failure.PAYLOAD, retry.Rule("payload_unavailable", 2, 0.01))
    monkeypatch.setattr(payloads, "LARGE_BYTES", 1000)
    ask = {"max_tokens": 60, "logprobs": 20}
    job_id = await submit(backend.store, PROMPT, **ask)
    bad = replace(backend, blobs=_NoBlobs())
    async with serving(bad):
        job = await the_end(backend.store, job_id)
    assert job.status is Status.FAILED
    assert job.outcome is not None
    assert job.outcome.error is not None
    assert job.outcome.error.code == "payload_unavailable"
    assert job.outcome.usage.completion_tokens == 60


async def test_a_begun_job_whose_request_is_gone_keeps_what_it_has(backend: Backend) -> None:
    lane = await backend.store.open_lane("fake")
    spec = JobSpec(model="fake", kind=Kind.GENERATE, prompt=PROMPT, params={"temperature": 0.0, "max_tokens": 500})
    backend.blobs.put("specs/one", pack(spec))
    job_id = new_job_id(lane)
    named = msgspec.structs.replace(spec, prompt=None, blob="specs/one")
    await backend.store.submit(NewJob(id=job_id, spec=named, cost_tokens=500))
    slow = replace(ENGINE, fake_seconds_per_step=0.01)
    async with serving(backend, settings=replace(SETTINGS, drain_seconds=0.0), engine=slow) as first:
        await until_running(backend, job_id)
        assert await first.stop() is True
    backend.blobs.delete("specs/one")
    async with serving(backend):
        failed = await the_end(backend.store, job_id)
    assert failed.outcome is not None
    assert failed.outcome.error is not None
    assert failed.outcome.error.code == "payload_missing"
    told = told_by(await checked_log(backend.store, job_id))
    assert failed.outcome.result is not None
    assert list(told.values()) == failed.outcome.result.choices
    assert failed.outcome.usage.completion_tokens == len(told[0].token_ids) > 0
    assert failed.outcome.usage.prompt_tokens == len(PROMPT)


async def test_jobs_begun_under_other_weights_are_not_continued(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(retry.RULES, retry.Failure.WEIGHTS, retry.Rule("weights_changed", 1, 0.01))
    begun = await submit(backend.store, PROMPT, max_tokens=500)
    slow = replace(ENGINE, fake_seconds_per_step=0.01)
    async with serving(backend, settings=replace(SETTINGS, drain_seconds=0.0), engine=slow) as first:
        await until_running(backend, begun)
        assert await first.stop() is True
    untouched = await submit(backend.store, PROMPT, max_tokens=20)

    def other_weights() -> LLM:
        loaded = load_fake(ENGINE)
        return LLM(replace(loaded, info=replace(loaded.info, weights_digest="fake-2")), ENGINE)

    async with serving(backend, load=other_weights):
        failed = await the_end(backend.store, begun)
        assert (await the_end(backend.store, untouched)).status is Status.SUCCEEDED
    assert failed.outcome is not None
    assert failed.outcome.error is not None
    assert failed.outcome.error.code == "weights_changed"
    assert failed.outcome.result is not None
    told = told_by(await checked_log(backend.store, begun))
    assert list(told.values()) == failed.outcome.result.choices


async def test_another_profile_of_the_same_weights_goes_on_and_says_so(backend: Backend) -> None:
    begun = await submit(backend.store, PROMPT, max_tokens=200)
    slow = replace(ENGINE, fake_seconds_per_step=0.01)
    async with serving(backend, settings=replace(SETTINGS, drain_seconds=0.0), engine=slow) as first:
        await until_running(backend, begun)
        assert await first.stop() is True

    def other_kernels() -> LLM:
        loaded = load_fake(ENGINE)
        return LLM(replace(loaded, info=replace(loaded.info, kernels="fake-2")), ENGINE)

    async with serving(backend, load=other_kernels):
        job = await the_end(backend.store, begun)
    own, other = profile_of(load_fake(ENGINE).info), profile_of(other_kernels().info)
    assert (job.status, job.profile, job.continued_profiles) == (Status.SUCCEEDED, own, [other])
    events = await checked_log(backend.store, begun)
    assert [event.body.profile for event in events if event.type == "job.started"] == [None, other]
    assert job.outcome is not None and job.outcome.usage.completion_tokens == 200
    told = told_by(events)
    assert job.outcome.result is not None and list(told.values()) == job.outcome.result.choices


async def test_claims_whose_answers_are_lost_cost_their_jobs_nothing(backend: Backend) -> None:
    faults = Faults()
    faults.lose_replies["claim"] = 5
    ids = [await submit(backend.store, PROMPT, max_tokens=20) for _ in range(8)]
    async with serving(backend.with_faults(faults)):
        jobs = [await the_end(backend.store, job_id) for job_id in ids]
    assert faults.lose_replies["claim"] == 0
    assert [(job.status, job.attempt, job.lost_count) for job in jobs] == [(Status.SUCCEEDED, 1, 0)] * len(ids)


async def test_one_span_per_attempt_in_the_callers_trace(backend: Backend) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.start("worker", exporter=exporter)
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    lane = await backend.store.open_lane("fake")
    spec = JobSpec(model="fake", kind=Kind.GENERATE, prompt=PROMPT, params={"temperature": 0.0, "max_tokens": 500})
    job_id = new_job_id(lane)
    await backend.store.submit(NewJob(id=job_id, spec=spec, cost_tokens=500, traceparent=caller))
    slow = replace(ENGINE, fake_seconds_per_step=0.005)
    hasty = replace(SETTINGS, drain_seconds=0.0)
    async with serving(backend, settings=hasty, engine=slow, telemetry=telemetry) as first:
        await until_running(backend, job_id)
        await first.stop()
    async with serving(backend, telemetry=telemetry):
        await the_end(backend.store, job_id)
    telemetry.close()
    handed_over, finished = exporter.get_finished_spans()
    for span in (handed_over, finished):
        assert span.name == "process fake"
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" in caller
        assert [f"{link.context.span_id:016x}" in caller for link in span.links] == [True]
        assert PROMPT not in span.to_json()
    assert [event.name for event in handed_over.events] == ["first_token", "hand_over"]
    assert finished.attributes is not None
    assert finished.attributes["gen_ai.usage.output_tokens"] == 500
    assert finished.attributes["millstream.attempt"] == 2


async def test_a_lost_reply_to_a_commit_is_no_lost_job(backend: Backend) -> None:
    """Meanwhile the renewals hear that the job is no longer ours: it has ended, by our own hand."""
    exporter, faults = InMemorySpanExporter(), Faults()
    telemetry = Telemetry.start("worker", exporter=exporter)
    settings = replace(SETTINGS, renew_seconds=0.005)
    async with serving(backend.with_faults(faults), settings=settings, telemetry=telemetry) as running:
        for number in range(8):
            faults.lose_replies["commit"] = 1
            job_id = await submit(backend.store, f"{number} {PROMPT}", max_tokens=20)
            await assert_undisturbed(backend, job_id, f"{number} {PROMPT}", max_tokens=20)
            await until(lambda: not running.bridge.attempts)
        assert await running.stop() is True
    telemetry.close()
    spans = exporter.get_finished_spans()
    assert [(span.attributes or {}).get("error.type") for span in spans] == [None] * 8
