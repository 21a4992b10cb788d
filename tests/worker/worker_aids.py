"""What the worker's tests share: faults, bounded waiting, a worker that serves, jobs and what became of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from engine import LLM, EngineConfig, SamplingParams
from infra.blobs import Blobs
from infra.contracts import Choice, Event, Job, JobSpec, Kind, Message, NewJob, Tier
from infra.errors import StoreUnavailable
from infra.keys import new_job_id
from infra.settings import WorkerSettings
from infra.states import TERMINAL
from infra.store import JobStore
from infra.telemetry import Telemetry
from worker.bridge import Bridge
from worker.progress import Progress
from worker.service import Worker
from worker.signals import Stopping


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that must come; fails the test where it does not."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (whatever makes it true knows nothing of tests)
            await asyncio.sleep(0.005)


class Faults:
    """`lose_calls` fails the next calls of a verb unmade, `lose_replies` after their effect; `is_away` fails all."""

    def __init__(self) -> None:
        self.lose_calls: Counter[str] = Counter()
        self.lose_replies: Counter[str] = Counter()
        self.is_away = False
        self.away_lanes: set[int] = set()  # claims from these fail
        self.calls: Counter[str] = Counter()

    def strikes(self, faults: Counter[str], name: str) -> bool:
        if faults[name] <= 0:
            return False
        faults[name] -= 1
        return True


class FaultyStore:
    """Passes everything on to `store`, as far as `faults` lets it."""

    def __init__(self, store: JobStore, faults: Faults) -> None:
        self._store = store
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        verb, faults = getattr(self._store, name), self._faults

        async def call(*args: Any, **kwargs: Any) -> Any:
            faults.calls[name] += 1
            if name != "close" and (faults.is_away or faults.strikes(faults.lose_calls, name)):
                raise StoreUnavailable
            if name == "claim" and args[0] in faults.away_lanes:
                raise StoreUnavailable
            answer = await verb(*args, **kwargs)
            if faults.strikes(faults.lose_replies, name):
                raise StoreUnavailable
            return answer

        return call


@dataclass
class Backend:
    """A store, and how to get another client to it."""

    store: JobStore
    open: Callable[[], Coroutine[Any, Any, JobStore]]
    blobs: Blobs

    def with_faults(self, faults: Faults) -> Backend:
        """The same for a worker whose connections are bad; `store` stays good."""

        async def open_faulty() -> JobStore:
            return FaultyStore(await self.open(), faults)  # type: ignore[return-value]

        return Backend(self.store, open_faulty, self.blobs)


SETTINGS = WorkerSettings(
    model="fake", lease_seconds=2.0, renew_seconds=0.2, stall_seconds=60.0, drain_seconds=20.0, flush_seconds=0.005
)
ENGINE = EngineConfig(max_num_seqs=16, num_kv_blocks=512, fake_seconds_per_step=0.002)


@dataclass
class Running:
    """A worker that serves in this event loop."""

    worker: Worker
    stopping: Stopping
    served: asyncio.Task[bool]

    @property
    def bridge(self) -> Bridge:
        assert self.worker.bridge is not None
        return self.worker.bridge

    async def stop(self) -> bool:
        self.stopping.tell()
        return await self.served


@asynccontextmanager
async def serving(
    backend: Backend,
    *,
    settings: WorkerSettings = SETTINGS,
    engine: EngineConfig = ENGINE,
    load: Callable[[], LLM] | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[Running]:
    """A worker over the store, ready; stopped in a hurry at the end, if it still serves."""
    stopping = Stopping()
    worker = Worker(
        settings,
        open_store=backend.open,
        blobs=backend.blobs,
        load=load or (lambda: LLM("fake", engine)),
        telemetry=telemetry,
    )
    served = asyncio.ensure_future(worker.serve(stopping))
    await until(lambda: worker.bridge is not None or served.done())
    running = Running(worker, stopping, served)
    try:
        yield running
    finally:
        stopping.tell()
        stopping.tell()
        await served


async def submit(
    store: JobStore,
    prompt: str | list[Message] | list[int],
    *,
    alias: str = "fake",
    cost_tokens: int = 100,
    tier: Tier = Tier.STANDARD,
    **params: Any,
) -> str:
    """Admits a job as a gateway would; returns its id."""
    lane = await store.open_lane(alias)
    spec = JobSpec(model=alias, kind=Kind.GENERATE, params={"seed": 7, "temperature": 0.0, **params})
    if isinstance(prompt, str):
        spec.prompt = prompt
    elif isinstance(prompt[0], Message):
        spec.messages = [one for one in prompt if isinstance(one, Message)]
    else:
        spec.prompt_token_ids = [one for one in prompt if isinstance(one, int)]
    job = NewJob(id=new_job_id(lane), spec=spec, cost_tokens=cost_tokens, tier=tier)
    await store.submit(job)
    return job.id


async def until_running(backend: Backend, job_id: str, *, num_events: int = 3) -> None:
    """Until so many events of the job are there: queued, started, a delta."""
    async with asyncio.timeout(30):
        while len(await backend.store.events(job_id)) < num_events:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def the_end(store: JobStore, job_id: str) -> Job:
    """The record of a job once it has ended."""
    async with asyncio.timeout(60):
        while True:
            job = await store.get(job_id)
            assert job is not None
            if job.status in TERMINAL:
                return job
            await asyncio.sleep(0.01)


async def checked_log(store: JobStore, job_id: str) -> list[Event]:
    """A job's whole event log, after checking what must be true of every log."""
    events: list[Event] = []
    while page := await store.events(job_id, after=len(events) - 1):
        events += page
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "job.queued"
    assert [event.is_last for event in events] == [False] * (len(events) - 1) + [True]
    return events


def told_by(events: list[Event]) -> dict[int, Choice]:
    """What a client that follows the stream has read: the joined deltas, by choice."""
    progress = Progress.of(0, events)
    return {choice.index: choice.as_choice() for choice in progress.choices}


def undisturbed(
    prompt: str | list[int], *, engine: EngineConfig = ENGINE, **params: Any
) -> list[tuple[list[int], str, str | None]]:
    """Token ids, text and finish reason of each choice, as the engine gives them alone."""
    (output,) = LLM("fake", replace(engine, fake_seconds_per_step=0.0)).generate(
        [prompt], SamplingParams(**{"seed": 7, "temperature": 0.0, **params})
    )
    return [(choice.token_ids, choice.text, choice.finish_reason) for choice in output.choices]


def said(choices: Iterable[Choice]) -> list[tuple[list[int], str, str | None]]:
    """The same of a job's choices."""
    return [(choice.token_ids, choice.text, choice.finish_reason) for choice in choices]
