"""The run store in this process: for tests and single-process use. Same promises as `infra.runs.redis`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from infra.contracts import JobError
from infra.runs.records import DocumentSource, DocumentState, NewRun, RunHeader
from infra.runs.store import Document, DocumentUpdate, Written
from infra.runs.views import RunView, view_of
from infra.states import Status

Record = TypeVar("Record", bound=msgspec.Struct)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class _Run:
    header: RunHeader
    sources: list[DocumentSource]
    states: list[DocumentState]
    texts: dict[tuple[int, str], str] = field(default_factory=dict)
    fed: set[tuple[int, str]] = field(default_factory=set)


class MemoryRuns:
    """Nothing awaits inside a method, so each is one step for every other coroutine."""

    def __init__(self, *, now_ms: Callable[[], int] = _wall_ms) -> None:
        self._now_ms = now_ms
        self._runs: dict[str, _Run] = {}
        self._due: dict[str, int] = {}  # run id -> when it wants to be looked at

    async def create(self, run: NewRun) -> bool:
        run.check()
        is_new = run.id not in self._runs
        if is_new:
            header = RunHeader(
                run=msgspec.structs.replace(run, documents=[]),
                status=Status.QUEUED,
                num_documents=len(run.documents),
                created_ms=self._now_ms(),
            )
            states = [DocumentState() for _ in run.documents]
            self._runs[run.id] = _Run(header, list(run.documents), states)
        if not self._runs[run.id].header.is_finished:
            await self.wake(run.id)
        return is_new

    async def get(self, run_id: str) -> RunView | None:
        run = self._runs.get(run_id)
        return None if run is None else view_of(_copy(run.header), run.sources, [_copy(one) for one in run.states])

    async def cancel(self, run_id: str) -> RunView | None:
        if await self.finish(run_id, Status.CANCELLED):
            await self.wake(run_id)
        return await self.get(run_id)

    async def unfed(self) -> dict[str, int]:
        found = Counter[str]()
        for run in self._runs.values():
            if not run.header.is_finished:
                num_unfed = sum(state.num_unfed for state in run.states)
                found[run.header.run.params.model] += max(num_unfed, int(bool(run.fed)))
        return dict(found)

    async def header(self, run_id: str) -> RunHeader | None:
        run = self._runs.get(run_id)
        return None if run is None else _copy(run.header)

    async def open_documents(self, run_id: str, *, limit: int, after: int = -1) -> list[int]:
        run = self._runs.get(run_id)
        states = run.states if run else []
        numbers = (number for number, state in enumerate(states) if number > after and not state.is_finished)
        return [number for number, _ in zip(numbers, range(limit), strict=False)]

    async def documents(self, run_id: str, numbers: Sequence[int]) -> list[Document]:
        run = self._runs.get(run_id)
        if run is None:
            return []
        known = (number for number in numbers if 0 <= number < len(run.states))
        return [Document(number, run.sources[number], _copy(run.states[number])) for number in known]

    async def texts(self, run_id: str, number: int, items: Sequence[str]) -> dict[str, str]:
        run = self._runs.get(run_id)
        return {} if run is None else {item: run.texts[number, item] for item in items if (number, item) in run.texts}

    async def update(self, run_id: str, update: DocumentUpdate, *, window: int) -> Written:
        run = self._runs.get(run_id)
        if run is None or run.header.is_finished:
            return Written.CLOSED
        if run.states[update.number].version != update.state.version:
            return Written.STALE
        settled = {(update.number, item) for item in update.settled}
        if update.fed and len(run.fed - settled) + len(update.fed) > window:
            return Written.FULL
        run.fed = (run.fed - settled) | {(update.number, item) for item in update.fed}
        run.texts.update({(update.number, item): text for item, text in update.texts.items()})
        run.states[update.number] = _copy(update.state)
        run.states[update.number].version += 1
        run.header.sequence_number += 1
        if run.header.status is Status.QUEUED:
            run.header.status, run.header.started_ms = Status.RUNNING, self._now_ms()
        return Written.YES

    async def in_flight(self, run_id: str) -> list[tuple[int, str]]:
        run = self._runs.get(run_id)
        return sorted(run.fed) if run else []

    async def finish(self, run_id: str, status: Status, *, error: JobError | None = None,
                     output: str | None = None) -> bool:  # fmt: skip
        run = self._runs.get(run_id)
        if run is None or run.header.is_finished:
            return False
        header = run.header
        header.status, header.error, header.output = status, error, output
        header.finished_ms = self._now_ms()
        header.sequence_number += 1
        return True

    async def drop_in_flight(self, run_id: str, items: Sequence[tuple[int, str]]) -> None:
        run = self._runs.get(run_id)
        if run is not None:
            run.fed.difference_update(items)

    async def now_ms(self) -> int:
        return self._now_ms()

    async def wake(self, run_id: str, *, delay_seconds: float = 0.0) -> None:
        wanted = self._now_ms() + round(delay_seconds * 1000)
        self._due[run_id] = min(wanted, self._due.get(run_id, wanted))

    async def take_due(self, *, limit: int, hide_seconds: float) -> list[str]:
        now = self._now_ms()
        ripe = sorted((at, run_id) for run_id, at in self._due.items() if at <= now)[:limit]
        for _, run_id in ripe:
            self._due[run_id] = now + round(hide_seconds * 1000)
        return [run_id for _, run_id in ripe]

    async def delay(self, run_id: str, *, delay_seconds: float) -> None:
        if run_id in self._due:
            self._due[run_id] = self._now_ms() + round(delay_seconds * 1000)

    async def rest(self, run_id: str) -> bool:
        run = self._runs.get(run_id)
        if run is not None and not run.header.is_finished:
            return False
        return self._due.pop(run_id, None) is not None

    async def close(self) -> None:
        return None


def _copy(record: Record) -> Record:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record))
