"""Pauses between tries at something that is away for a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from infra.errors import StoreUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")


class Backoff:
    """Each pause twice as long as the one before, up to a bound."""

    def __init__(self, *, first_seconds: float = 0.05, most_seconds: float = 1.0) -> None:
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._next_seconds = first_seconds

    @property
    def is_fresh(self) -> bool:
        """No pause was made since it was reset."""
        return self._next_seconds == self._first_seconds

    async def pause(self) -> None:
        seconds, self._next_seconds = self._next_seconds, min(self._next_seconds * 2, self._most_seconds)
        await asyncio.sleep(seconds)

    def reset(self) -> None:
        """It is back: the next pause is the first again."""
        self._next_seconds = self._first_seconds


async def until_answered(call: Callable[[], Awaitable[T]], *, is_wanted: Callable[[], bool], what: str) -> T | None:
    """Repeats a store call until it is answered. None where the answer is not wanted any more."""
    backoff = Backoff()
    while is_wanted():
        try:
            return await call()
        except StoreUnavailable as error:
            if backoff.is_fresh:
                log.warning("%s waits, the store does not answer: %s", what, error)
            await backoff.pause()
    return None
