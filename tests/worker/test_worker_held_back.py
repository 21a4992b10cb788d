"""Jobs whose choices are known only at their end (beams, best_of): told whole, and begun anew wherever they run."""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.states import Status
from tests.worker.test_worker_processes import PROMPT, fleet_over, requeues, undisturbed_end
from tests.worker.worker_aids import (
    ENGINE,
    SETTINGS,
    Backend,
    checked_log,
    said,
    serving,
    submit,
    the_end,
    told_by,
    undisturbed,
    until_running,
)

BEAMS: dict[str, Any] = {"temperature": 1.0, "n": 3, "use_beam_search": True, "length_penalty": 0.5, "logprobs": 1}
BEST_OF: dict[str, Any] = {"temperature": 1.0, "n": 2, "best_of": 5, "seed": 11}
BOTH = pytest.mark.parametrize("params", [BEAMS, BEST_OF], ids=["beams", "best_of"])


@BOTH
async def test_a_job_is_told_whole_at_its_end(backend: Backend, params: dict[str, Any]) -> None:
    ask = {"max_tokens": 40, **params}
    async with serving(backend):
        job_id = await submit(backend.store, PROMPT, **ask)
        job = await the_end(backend.store, job_id)
    assert job.status is Status.SUCCEEDED and job.outcome is not None and job.outcome.result is not None
    choices = job.outcome.result.choices
    assert said(choices) == undisturbed(PROMPT, **ask)
    assert [choice.index for choice in choices] == list(range(params["n"]))
    scores = [choice.score for choice in choices]
    assert None not in scores and scores == sorted(scores, key=lambda score: -(score or 0.0))
    log = await checked_log(backend.store, job_id)
    assert [event.type for event in log] == ["job.queued", "job.started", "job.delta", "job.succeeded"]
    assert list(told_by(log).values()) == choices
    assert job.outcome.usage.completion_tokens == params["n"] * 40


@BOTH
async def test_candidates_take_seats(backend: Backend, params: dict[str, Any]) -> None:
    engine = replace(ENGINE, fake_seconds_per_step=0.01)
    async with serving(backend, engine=engine) as running:
        job_id = await submit(backend.store, PROMPT, max_tokens=100, **params)
        await until_running(backend, job_id, num_events=2)
        async with asyncio.timeout(30):
            while not (attempts := [a for a in running.bridge.attempts.values() if a.is_accepted]):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        (attempt,) = attempts
        width = params.get("best_of", params["n"])
        assert attempt.num_sequences == width
        assert attempt.remaining_tokens == [100] * width
        await the_end(backend.store, job_id)


@BOTH
async def test_what_is_handed_over_begins_anew(backend: Backend, params: dict[str, Any]) -> None:
    engine = replace(ENGINE, fake_seconds_per_step=0.01)
    ask = {"max_tokens": 60, **params}
    async with serving(backend, settings=replace(SETTINGS, drain_seconds=0.0), engine=engine) as first:
        job_id = await submit(backend.store, PROMPT, **ask)
        await until_running(backend, job_id, num_events=2)
        await asyncio.sleep(0.2)  # well into its 60 steps
        assert await first.stop() is True
    async with serving(backend, engine=engine):
        job = await the_end(backend.store, job_id)
    assert job.status is Status.SUCCEEDED and job.attempt == 2 and job.outcome is not None
    assert job.outcome.result is not None
    assert said(job.outcome.result.choices) == undisturbed(PROMPT, **ask)
    log = await checked_log(backend.store, job_id)
    assert requeues(log) == ["hand_over"]
    assert [event.body.attempt for event in log if event.type == "job.delta"] == [2]


@BOTH
async def test_a_killed_workers_job_begins_anew_and_nobody_sees_it(
    redis_url: str, tmp_path: Path, params: dict[str, Any]
) -> None:
    ask = {"max_tokens": 120, **params}
    async with fleet_over(redis_url, tmp_path) as fleet:
        first = await fleet.worker()
        job_id = await submit(fleet.store, PROMPT, **ask)
        await until_running(fleet.backend, job_id, num_events=2)
        await asyncio.sleep(0.3)  # well into its 120 steps
        assert len(await fleet.store.events(job_id)) == 2
        first.send(signal.SIGKILL)
        await fleet.worker()
        job, log = await undisturbed_end(fleet, job_id, PROMPT, ask)
    assert (job.attempt, job.lost_count) == (2, 1)
    assert requeues(log) == ["lease_lost"]
    assert [event.body.attempt for event in log if event.type == "job.delta"] == [2]
