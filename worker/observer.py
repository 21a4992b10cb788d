"""What the bridge tells those who only watch: metrics and traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.attempt import Attempt
from worker.engine_thread import Report


class Observer(Protocol):
    """Called in the event loop; must be quick and must not fail."""

    def claimed(self, attempt: Attempt) -> None: ...

    def stepped(self, report: Report) -> None: ...

    def emitted(self, attempt: Attempt, num_tokens: int) -> None: ...

    def ended(self, attempt: Attempt) -> None:
        """Its end (`attempt.end`) is written."""
        ...

    def lost(self, attempt: Attempt) -> None:
        """It is no longer ours: cancelled, expired, or claimed by another."""
        ...


class Observers:
    """Many as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def claimed(self, attempt: Attempt) -> None:
        for observer in self._observers:
            observer.claimed(attempt)

    def stepped(self, report: Report) -> None:
        for observer in self._observers:
            observer.stepped(report)

    def emitted(self, attempt: Attempt, num_tokens: int) -> None:
        for observer in self._observers:
            observer.emitted(attempt, num_tokens)

    def ended(self, attempt: Attempt) -> None:
        for observer in self._observers:
            observer.ended(attempt)

    def lost(self, attempt: Attempt) -> None:
        for observer in self._observers:
            observer.lost(attempt)
