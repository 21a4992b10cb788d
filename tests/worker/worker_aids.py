"""What the worker's tests share: a store whose answers can be made to fail, and bounded waiting."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from infra.errors import StoreUnavailable
from infra.store import JobStore


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that must come; fails the test where it does not."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (whatever makes it true knows nothing of tests)
            await asyncio.sleep(0.005)


class FaultyStore:
    """Passes everything on to `store`. `lose_calls` fails the next calls unmade, `lose_replies` after their effect."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.lose_calls: Counter[str] = Counter()
        self.lose_replies: Counter[str] = Counter()
        self.is_away = False
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if self.is_away or self._strikes(self.lose_calls, name):
                raise StoreUnavailable
            answer = await verb(*args, **kwargs)
            if self._strikes(self.lose_replies, name):
                raise StoreUnavailable
            return answer

        return call

    def _strikes(self, faults: Counter[str], name: str) -> bool:
        if faults[name] <= 0:
            return False
        faults[name] -= 1
        return True
