"""What a run store promises.

`infra.runs.redis` keeps it in Redis or Valkey, `infra.runs.memory` in this process; one test suite holds both to it.

A run is level-triggered: whoever advances it reads what is, and submits what is missing. Every open run has an entry in
one clock (`take_due`), so that it is advanced again, whatever was lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from infra.contracts import JobError
from infra.runs.records import DocumentSource, DocumentState, NewRun, RunHeader
from infra.runs.views import RunView
from infra.states import Status


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a run, as the steps work on it."""

    number: int  # its place in the run, from 0
    source: DocumentSource
    state: DocumentState


class Written(StrEnum):
    """What came of an update."""

    YES = "yes"
    STALE = "stale"  # somebody else changed the document first: read it again
    FULL = "full"  # the run's window has no room for what would be fed
    CLOSED = "closed"  # the run has ended


@dataclass(frozen=True, slots=True)
class DocumentUpdate:
    """A document's next state, written in one step or not at all."""

    number: int
    state: DocumentState  # with the version that was read; the store raises it
    texts: Mapping[str, str] = field(default_factory=dict)  # item id -> summary, of items that became done
    fed: Sequence[str] = ()  # item ids that became fed: they take room in the window
    settled: Sequence[str] = ()  # item ids that were fed and are now done or failed: they give room back


class RunStore(Protocol):
    """Every method may raise StoreUnavailable; then nothing is known to be written, and calling again is safe."""

    # What the gateway calls.

    async def create(self, run: NewRun) -> bool:
        """Admits a run and wakes it. False where the id was there: then only the wake is repeated.

        Inline texts must lie in the blob store before.
        """
        ...

    async def get(self, run_id: str) -> RunView | None:
        """The run with all of its documents; None if unknown."""
        ...

    async def cancel(self, run_id: str) -> RunView | None:
        """Ends an open run as cancelled at once; its jobs in the queue are cancelled by its next advance. Idempotent.

        Returns the run as it stands after, None if unknown.
        """
        ...

    async def unfed(self) -> dict[str, int]:
        """Items of open runs that are not on the queue yet, by the model they are for: work that is still to come.

        At least one for a run with items under way: its jobs may be about to reach the queue.
        """
        ...

    # What the steps call.

    async def header(self, run_id: str) -> RunHeader | None: ...

    async def open_documents(self, run_id: str, *, limit: int, after: int = -1) -> list[int]:
        """Numbers of documents that are not finished, ascending, above `after`."""
        ...

    async def documents(self, run_id: str, numbers: Sequence[int]) -> list[Document]:
        """The documents of those numbers, in that order. Unknown ones are left out."""
        ...

    async def texts(self, run_id: str, number: int, items: Sequence[str]) -> dict[str, str]:
        """Summaries written by `items` of a document; items that have none are left out."""
        ...

    async def update(self, run_id: str, update: DocumentUpdate, *, window: int) -> Written:
        """Writes a document's next state if nobody changed it since it was read and the run is open.

        A document whose new state is terminal leaves the open ones.
        """
        ...

    async def in_flight(self, run_id: str) -> list[tuple[int, str]]:
        """(document number, item id) of the items that are fed."""
        ...

    async def drop_in_flight(self, run_id: str, items: Sequence[tuple[int, str]]) -> None:
        """Forgets fed items of a run that has ended, once their jobs are cancelled."""
        ...

    async def finish(self, run_id: str, status: Status, *, error: JobError | None = None,
                     output: str | None = None) -> bool:  # fmt: skip
        """Ends an open run. False, nothing changed, where it has ended."""
        ...

    # The clock of runs.

    async def now_ms(self) -> int:
        """The store's own time, which deadlines are measured by."""
        ...

    async def wake(self, run_id: str, *, delay_seconds: float = 0.0) -> None:
        """The run wants to be looked at then, or earlier where it already wanted to be."""
        ...

    async def take_due(self, *, limit: int, hide_seconds: float) -> list[str]:
        """Ids of runs that want to be looked at, earliest first. They come up again after the time, or when woken."""
        ...

    async def delay(self, run_id: str, *, delay_seconds: float) -> None:
        """A run in the clock comes up again after so long and not before, unless it is woken."""
        ...

    async def rest(self, run_id: str) -> bool:
        """Takes a finished run that needs nothing more out of the clock. False, nothing changed, while it is open."""
        ...

    async def close(self) -> None: ...
