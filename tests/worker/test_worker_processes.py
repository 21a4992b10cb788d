"""Workers as processes over a real server: killed, stopped, told to go, and what the event logs say afterwards."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.blob_folder import FolderBlobs
from infra.contracts import Event, Job
from infra.embedded import EmbeddedServer
from infra.jobs import RedisJobs
from infra.states import Status
from millstream.tether import VARIABLE
from tests.worker.worker_aids import (
    Backend,
    checked_log,
    said,
    submit,
    the_end,
    told_by,
    undisturbed,
    until,
    until_running,
)

PROMPT = "The workers come and go; the work goes on."
GREEDY: dict[str, Any] = {"max_tokens": 160}
SEEDED: dict[str, Any] = {"max_tokens": 160, "temperature": 1.0, "seed": 11, "n": 2, "logprobs": 1}
SETTINGS = {"model": "fake", "lease_seconds": 1.0, "renew_seconds": 0.2, "drain_seconds": 30.0}
ENGINE = {"fake_seconds_per_step": 0.01, "num_kv_blocks": 512}


class WorkerProcess:
    def __init__(self, url: str, folder: Path, name: str, *, settings: dict[str, Any], engine: dict[str, Any]) -> None:
        script = Path(__file__).with_name("worker_process.py")
        arguments = [url, (folder / "blobs").as_uri(), json.dumps(SETTINGS | settings), json.dumps(ENGINE | engine)]
        self._said = folder / f"{name}.out"
        self._logged = folder / f"{name}.log"
        with self._said.open("wb") as said, self._logged.open("wb") as logged:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                stdout=said,
                stderr=logged,
                env=os.environ | {VARIABLE: str(os.getpid())},  # it dies with the test run, however that ends
            )

    @property
    def log(self) -> str:
        return self._logged.read_text()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def until_ready(self) -> None:
        await until(lambda: "worker ready: alias=fake lane=" in self._said.read_text() or not self.is_alive)

    async def exit_code(self) -> int:
        """Waits for its end."""
        await until(lambda: not self.is_alive)
        return self._process.returncode

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Fleet:
    """Worker processes over one store; none outlives the test."""

    def __init__(self, url: str, store: RedisJobs, folder: Path) -> None:
        self.store = store
        self._url = url
        self._folder = folder
        self._workers: list[WorkerProcess] = []

    @property
    def backend(self) -> Backend:
        async def another() -> RedisJobs:
            return await RedisJobs.connect(self._url)

        return Backend(self.store, another, FolderBlobs(self._folder / "blobs"))

    async def worker(
        self, *, settings: dict[str, Any] | None = None, engine: dict[str, Any] | None = None
    ) -> WorkerProcess:
        name = f"worker-{len(self._workers)}"
        worker = WorkerProcess(self._url, self._folder, name, settings=settings or {}, engine=engine or {})
        self._workers.append(worker)
        await worker.until_ready()
        return worker

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


@asynccontextmanager
async def fleet_over(url: str, folder: Path) -> AsyncIterator[Fleet]:
    store = await RedisJobs.connect(url)
    fleet = Fleet(url, store, folder)
    try:
        yield fleet
    finally:
        fleet.end()
        await store.close()


@pytest.fixture
async def fleet(redis_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet_over(redis_url, tmp_path) as fleet:
        yield fleet


async def undisturbed_end(fleet: Fleet, job_id: str, prompt: str, params: dict[str, Any]) -> tuple[Job, list[Event]]:
    """The record and log of a job that must have ended as if nothing had happened to it."""
    job = await the_end(fleet.store, job_id)
    assert job.status is Status.SUCCEEDED, job.outcome
    assert job.outcome is not None
    assert job.outcome.result is not None
    log = await checked_log(fleet.store, job_id)
    expected = undisturbed(prompt, **params)
    assert said(job.outcome.result.choices) == expected
    assert list(told_by(log).values()) == job.outcome.result.choices
    assert job.outcome.usage.completion_tokens == sum(len(token_ids) for token_ids, _, _ in expected)
    return job, log


def requeues(log: list[Event]) -> list[str | None]:
    return [event.body.reason for event in log if event.type == "job.requeued"]


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
async def test_a_killed_workers_job_goes_on_exactly(fleet: Fleet, params: dict[str, Any]) -> None:
    first = await fleet.worker()
    job_id = await submit(fleet.store, PROMPT, **params)
    await until_running(fleet.backend, job_id, num_events=20)
    first.send(signal.SIGKILL)
    await fleet.worker()
    job, log = await undisturbed_end(fleet, job_id, PROMPT, params)
    assert (job.attempt, job.lost_count) == (2, 1)
    assert requeues(log) == ["lease_lost"]


async def test_a_worker_that_slept_through_its_lease_is_fenced(fleet: Fleet) -> None:
    sleeper = await fleet.worker()
    job_id = await submit(fleet.store, PROMPT, **SEEDED)
    await until_running(fleet.backend, job_id, num_events=20)
    sleeper.send(signal.SIGSTOP)
    await fleet.worker()
    job, log = await undisturbed_end(fleet, job_id, PROMPT, SEEDED)
    assert (job.attempt, job.lost_count) == (2, 1)
    sleeper.send(signal.SIGCONT)
    sleeper.send(signal.SIGTERM)
    assert await sleeper.exit_code() == 0
    assert await checked_log(fleet.store, job_id) == log
    assert await fleet.store.get(job_id) == job


async def test_a_worker_woken_while_another_has_its_job_writes_nothing(fleet: Fleet) -> None:
    sleeper = await fleet.worker()
    job_id = await submit(fleet.store, PROMPT, **SEEDED)
    await until_running(fleet.backend, job_id, num_events=10)
    sleeper.send(signal.SIGSTOP)
    await fleet.worker(engine={"fake_seconds_per_step": 0.02})
    async with asyncio.timeout(30):
        while (job := await fleet.store.get(job_id)) is None or job.attempt < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    sleeper.send(signal.SIGCONT)
    job, log = await undisturbed_end(fleet, job_id, PROMPT, SEEDED)
    attempts = [event.body.attempt for event in log if event.type == "job.delta"]
    assert attempts == sorted(attempts)
    assert job.attempt == 2


async def test_sigterm_hands_over_what_does_not_fit(fleet: Fleet) -> None:
    first = await fleet.worker(settings={"drain_seconds": 0.1})
    ids = {await submit(fleet.store, f"{number} {PROMPT}", **SEEDED): number for number in range(4)}
    for job_id in ids:
        await until_running(fleet.backend, job_id, num_events=8)
    first.send(signal.SIGTERM)
    assert await first.exit_code() == 0
    second = await fleet.worker()
    for job_id, number in ids.items():
        job, log = await undisturbed_end(fleet, job_id, f"{number} {PROMPT}", SEEDED)
        assert (job.attempt, job.lost_count) == (2, 0)
        assert requeues(log) == ["hand_over"]
    second.send(signal.SIGTERM)
    assert await second.exit_code() == 0


async def test_sigterm_lets_finish_what_fits(fleet: Fleet) -> None:
    worker = await fleet.worker()
    job_id = await submit(fleet.store, PROMPT, **GREEDY)
    await until_running(fleet.backend, job_id)
    worker.send(signal.SIGTERM)
    assert await worker.exit_code() == 0
    job, log = await undisturbed_end(fleet, job_id, PROMPT, GREEDY)
    assert job.attempt == 1
    assert requeues(log) == []


async def test_a_second_signal_hurries(fleet: Fleet) -> None:
    worker = await fleet.worker()
    job_id = await submit(fleet.store, PROMPT, max_tokens=8000)
    await until_running(fleet.backend, job_id)
    worker.send(signal.SIGTERM)
    await asyncio.sleep(0.2)
    assert worker.is_alive
    worker.send(signal.SIGTERM)
    assert await worker.exit_code() == 0
    job = await fleet.store.get(job_id)
    assert job is not None
    assert (job.status, job.lost_count) == (Status.QUEUED, 0)


async def test_a_restarted_server_interrupts_nobody(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server")
    server.start()
    try:
        async with fleet_over(server.url, tmp_path) as fleet:
            worker = await fleet.worker()
            ids = {await submit(fleet.store, f"{number} {PROMPT}", **SEEDED): number for number in range(3)}
            for job_id in ids:
                await until_running(fleet.backend, job_id, num_events=8)
            server.stop()
            await asyncio.sleep(0.3)
            server.start()
            late = await submit(fleet.store, f"3 {PROMPT}", **SEEDED)
            for job_id, number in (ids | {late: 3}).items():
                await undisturbed_end(fleet, job_id, f"{number} {PROMPT}", SEEDED)
            worker.send(signal.SIGTERM)
            assert await worker.exit_code() == 0
    finally:
        server.stop()


async def test_a_prompt_that_kills_workers_is_put_away_and_its_neighbours_are_not(fleet: Fleet) -> None:
    engine = {"fake_poison": "poison"}
    poison = await submit(fleet.store, "a poisonous prompt", **GREEDY)
    good = {await submit(fleet.store, f"{number} {PROMPT}", **GREEDY): number for number in range(4)}

    async def keep_one_running() -> None:
        while True:
            worker = await fleet.worker(engine=engine)
            await worker.exit_code()

    keeping = asyncio.ensure_future(keep_one_running())
    try:
        dead = await the_end(fleet.store, poison)
        for job_id, number in good.items():
            job, _ = await undisturbed_end(fleet, job_id, f"{number} {PROMPT}", GREEDY)
            assert job.lost_count <= 2
    finally:
        keeping.cancel()
    assert dead.status is Status.FAILED
    assert dead.outcome is not None
    assert dead.outcome.error is not None
    assert (dead.outcome.error.code, dead.lost_count) == ("worker_lost", 3)
    (lane,) = await fleet.store.lanes("fake")
    assert await fleet.store.dead_letters(lane) == [poison]


async def test_no_job_is_lost_or_doubled_while_workers_are_killed(fleet: Fleet) -> None:
    chance = random.Random(4)
    workers = [await fleet.worker() for _ in range(2)]
    params = [GREEDY if number % 2 else SEEDED for number in range(24)]
    ids = [await submit(fleet.store, f"{number} {PROMPT}", **params[number]) for number in range(24)]
    for _ in range(3):
        await asyncio.sleep(0.5)
        victim = workers.pop(chance.randrange(len(workers)))
        victim.send(chance.choice([signal.SIGKILL, signal.SIGTERM]))
        workers.append(await fleet.worker())
    for number, job_id in enumerate(ids):
        await undisturbed_end(fleet, job_id, f"{number} {PROMPT}", params[number])
    (lane,) = await fleet.store.lanes("fake")
    load = await fleet.store.load(lane)
    assert (sum(load.waiting.values()), load.running) == (0, 0)
    for worker in workers:
        worker.send(signal.SIGTERM)
        assert await worker.exit_code() == 0
