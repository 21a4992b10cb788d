"""Which device blocks the copy stream still reads or writes, and what must end before they are touched. Pure.

being read (swap-out)     may be read by others, must not be written
being written (swap-in)   must be neither read nor written
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class _Event(Protocol):
    def is_done(self) -> bool: ...


AnyEvent = TypeVar("AnyEvent", bound=_Event)


class Fences(Generic[AnyEvent]):
    def __init__(self) -> None:
        self._reads: dict[int, AnyEvent] = {}  # the last read of a block ends with it
        self._writes: dict[int, AnyEvent] = {}

    def __len__(self) -> int:
        """Blocks with a copy that was not done when last looked at."""
        return len(self._reads.keys() | self._writes.keys())

    def are_read(self, blocks: Iterable[int], until: AnyEvent) -> None:
        self._reads.update(dict.fromkeys(blocks, until))

    def are_written(self, blocks: Iterable[int], until: AnyEvent) -> None:
        self._writes.update(dict.fromkeys(blocks, until))

    def before(self, *, reading: Iterable[int] = (), writing: Iterable[int] = ()) -> list[AnyEvent]:
        """The events to wait for before blocks are read or written; each once, and none that is done."""
        self._forget_done()
        writing = list(writing)
        events = [self._writes[block] for block in (*reading, *writing) if block in self._writes]
        events += [self._reads[block] for block in writing if block in self._reads]
        return list(dict.fromkeys(events))

    def _forget_done(self) -> None:
        self._reads = {block: event for block, event in self._reads.items() if not event.is_done()}
        self._writes = {block: event for block, event in self._writes.items() if not event.is_done()}
