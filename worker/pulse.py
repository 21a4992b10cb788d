"""Whether a loop still turns, readable from any thread."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pulse:
    """A loop beats at each turn, and rests while it has nothing to do.

    One thread beats and rests; any thread may ask. Times are seconds of `clock`, which must be monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat_at = clock()
        self.num_beats = 0
        self.is_resting = True

    def beat(self) -> None:
        self._beat_at = self._clock()
        self.num_beats += 1
        self.is_resting = False

    def rest(self) -> None:
        self.is_resting = True

    @property
    def silent_seconds(self) -> float:
        """How long the loop has been at one turn; 0 while it rests."""
        return 0.0 if self.is_resting else self._clock() - self._beat_at
