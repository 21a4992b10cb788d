"""Time for a bench that must end: every section has a share, and what is over is not begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")


@dataclass
class Budget:
    """`seconds` from now on. A part of a budget never outlasts it."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _ends: float = field(init=False)

    def __post_init__(self) -> None:
        self._ends = self.clock() + self.seconds

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._ends - self.clock())

    def part(self, seconds: float) -> Budget:
        return Budget(min(seconds, self.seconds_left), self.clock)

    def while_it_lasts(self, items: Iterable[Item], skipped: list[str], name: Callable[[Item], str]) -> Iterator[Item]:
        """The items until the time is over; the names of the others go to `skipped`."""
        for item in items:
            if self.seconds_left > 0:
                yield item
            else:
                skipped.append(name(item))
