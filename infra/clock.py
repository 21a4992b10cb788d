"""Time for code that must not own a clock: handed in, so that tests turn it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        ...


class SystemClock:
    """The machine's wall clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """Stands still until it is turned."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, *, seconds: float = 0.0, ms: int = 0) -> None:
        """Turns the clock forward; never back."""
        step_ms = ms + round(seconds * 1000)
        if step_ms < 0:
            raise ValueError(f"a clock only goes forward, not by {step_ms} ms")
        self._now_ms += step_ms
