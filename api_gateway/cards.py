"""Which models there are: their cards and lanes, read from the store at most once in a while."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field

from infra.contracts import ModelCard
from infra.errors import UnknownModel
from infra.store import JobStore

FRESH_SECONDS = 2.0
ASK_AGAIN_SECONDS = 0.2  # an unknown model may just have come up; but names are free to invent


@dataclass(slots=True)
class Cards:
    """The models of a store."""

    store: JobStore
    _cards: dict[str, ModelCard] = field(default_factory=dict)
    _lanes: dict[str, list[int]] = field(default_factory=dict)  # those open to new jobs
    _read_at: float = float("-inf")
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def all(self) -> dict[str, ModelCard]:
        await self._refresh(FRESH_SECONDS)
        return self._cards

    async def get(self, alias: str) -> ModelCard:
        """The card of a model. Raises UnknownModel naming those that there are."""
        await self._refresh(FRESH_SECONDS)
        if alias not in self._cards:
            await self._refresh(ASK_AGAIN_SECONDS)
        if alias not in self._cards:
            known = ", ".join(sorted(self._cards)[:20]) or "none yet: no worker has ever registered one"
            raise UnknownModel(f"model: {alias[:80]!r} is not served here; served are: {known}", param="model")
        return self._cards[alias]

    async def lane(self, alias: str) -> int:
        """A lane for a new job of the alias: any open one, each as likely."""
        if not self._lanes.get(alias):
            self._lanes[alias] = [await self.store.open_lane(alias)]
        return random.choice(self._lanes[alias])

    async def _refresh(self, max_age_seconds: float) -> None:
        if time.monotonic() - self._read_at < max_age_seconds:
            return
        async with self._lock:
            if time.monotonic() - self._read_at >= max_age_seconds:
                self._cards = await self.store.cards()
                self._lanes = defaultdict(list)
                for lane in await self.store.lane_states():
                    if lane.is_open:
                        self._lanes[lane.alias].append(lane.number)
                self._read_at = time.monotonic()
