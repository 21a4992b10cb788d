"""What a run needs around it: a model card, documents, and a worker that answers as its script says."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from infra.blobs import Blobs, open_blobs
from infra.contracts import Choice, Claim, JobError, ModelCard, Outcome, Result, Usage
from infra.runs import DocumentSource, NewRun, RunStore, RunView, SummaryParams, document_blob, new_run_id
from infra.runs.memory import MemoryRuns
from infra.runs.redis import RedisRuns
from infra.states import Status
from infra.store import JobStore
from tests.models import CHAT_TEMPLATE, VOCAB_SIZE, write_tiny_tokenizer
from worker.runs.steps import RunSteps

MODEL = "tiny"
USAGE = Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=2)


def words(count: int, word: str = "word") -> str:
    """About `count` sentences of text."""
    return " ".join(f"The {word} of number {index} is here." for index in range(count))


async def serve_model(store: JobStore, blobs: Blobs, folder: Path, *, max_model_len: int = 512) -> None:
    """A card and a lane for the model, as a worker makes them."""
    write_tiny_tokenizer(folder)
    blobs.put("tokenizers/tiny", (folder / "tokenizer.json").read_bytes())
    card = ModelCard(
        alias=MODEL,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        tokenizer_digest="tiny",
        tokenizer_blob="tokenizers/tiny",
        weights_digest="w",
        profile="p",
        chat_template=CHAT_TEMPLATE,
    )
    await store.put_card(card)
    await store.open_lane(MODEL)


def new_run(blobs: Blobs, *texts: str, params: SummaryParams | None = None, **fields: object) -> NewRun:
    """A run over inline texts, laid among the blobs as the gateway does."""
    run_id = new_run_id()
    for number, text in enumerate(texts):
        blobs.put(document_blob(run_id, number), text.encode())
    documents = [
        DocumentSource(id=f"doc-{number}", name=f"doc-{number}.txt", blob=document_blob(run_id, number))
        for number in range(len(texts))
    ]
    params = params or SummaryParams(model=MODEL, target_tokens=16, chunk_tokens=64, fan_in=3)
    return NewRun(id=run_id, params=params, documents=documents, **fields)  # type: ignore[arg-type]


def summary(claim: Claim) -> Outcome:
    """The scripted worker's usual answer: short, and different for each item."""
    item = claim.job.spec.run_item
    name = item.item_id if item else "?"
    choice = Choice(index=0, text=f" summary of {name} ", token_ids=[1, 2, 3], finish_reason="stop")
    return Outcome(status=Status.SUCCEEDED, result=Result(choices=[choice]), usage=USAGE)


def failure(claim: Claim) -> Outcome:
    return Outcome(status=Status.FAILED, error=JobError(code="engine_error", message="the forward broke"))


@dataclass
class ScriptedWorker:
    """Claims, answers, commits: a client of the store, as a worker is one."""

    store: JobStore
    answer: Callable[[Claim], Outcome] = summary
    jobs: Counter[str] = field(default_factory=Counter)  # job id -> times committed
    items: Counter[str] = field(default_factory=Counter)  # item id -> times committed
    prompts: dict[str, str] = field(default_factory=dict)  # item id -> what was asked
    most_waiting: int = 0

    async def work_once(self) -> int:
        """Works off what is in the queue now; returns how many jobs."""
        (lane,) = await self.store.lanes(MODEL)
        load = await self.store.load(lane)
        self.most_waiting = max(self.most_waiting, sum(load.waiting.values()) + load.running)
        count = 0
        while claim := await self.store.claim(lane, "scripted", free_tokens=None, lease_seconds=30):
            spec = claim.job.spec
            assert spec.run_item is not None and spec.messages is not None
            assert await self.store.commit(claim.hold, self.answer(claim))
            self.jobs[claim.job.id] += 1
            self.items[spec.run_item.item_id] += 1
            self.prompts[spec.run_item.item_id] = spec.messages[0].content
            count += 1
        return count

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        stop = asyncio.Event()

        async def until_stop() -> None:
            while not stop.is_set():
                if not await self.work_once():
                    await asyncio.sleep(0.01)

        task = asyncio.create_task(until_stop())
        try:
            yield
        finally:
            stop.set()  # not cancelled: before Python 3.12, `asyncio.wait_for` may swallow that, and redis-py uses it
            await task


@dataclass
class World:
    """The parts of a run in this process; steps are called by hand."""

    store: JobStore
    runs: RunStore
    blobs: Blobs
    steps: RunSteps
    worker: ScriptedWorker
    splits: list[tuple[str, int]]  # asked for and not done yet

    async def split_all(self) -> None:
        while self.splits:
            await self.steps.split(*self.splits.pop(0))

    async def bring_to_end(self, run_id: str, *, max_rounds: int = 100) -> RunView:
        """Advances, splits and works in turn until the run has ended."""
        for _ in range(max_rounds):
            await self.steps.advance(run_id)
            await self.split_all()
            await self.worker.work_once()
            view = await self.runs.get(run_id)
            assert view is not None
            if view.header.is_finished:
                return view
        raise AssertionError(f"the run does not end: {view}")

    def output(self, view: RunView) -> list[dict[str, object]]:
        assert view.header.output is not None
        return [json.loads(line) for line in self.blobs.get(view.header.output).splitlines()]


@asynccontextmanager
async def world_over(store: JobStore, store_url: str, folder: Path, *, window: int) -> AsyncIterator[World]:
    """`store_url`: `memory`, or the address of the store."""
    runs: RunStore = MemoryRuns() if store_url == "memory" else RedisRuns.open(store_url)
    blobs = open_blobs((folder / "blobs").as_uri())
    await serve_model(store, blobs, folder)
    splits: list[tuple[str, int]] = []
    roots = [str(folder / "inputs")]
    steps = RunSteps(
        store, runs, blobs, window=window, roots=roots, ask_split=lambda run, number: splits.append((run, number))
    )
    yield World(store, runs, blobs, steps, ScriptedWorker(store), splits)
    await runs.close()
