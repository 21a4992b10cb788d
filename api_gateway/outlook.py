"""The facts of each alias's queue, read from the store at most so often. Every gateway reads the same."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field

from api_gateway import eta
from api_gateway.cards import Cards
from api_gateway.eta import Facts
from infra.contracts import Job
from infra.runs import RunStore
from infra.store import JobStore
from infra.work import Work

FRESH_SECONDS = 0.25  # for places and deadlines; how many jobs run is read anew with each place
UNFED_SECONDS = 2.0


@dataclass(slots=True)
class _Known:
    facts: Facts | None = None
    read_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class Outlook:
    """What lies before an alias's workers, and how long it takes them."""

    store: JobStore
    cards: Cards
    runs: RunStore | None
    _known: defaultdict[str, _Known] = field(default_factory=lambda: defaultdict(_Known))
    _unfed: dict[str, int] = field(default_factory=dict)
    _unfed_read_at: float = float("-inf")

    async def facts(self, alias: str, *, max_age_seconds: float = FRESH_SECONDS) -> Facts:
        """Raises UnknownModel."""
        known = self._known.get(alias)
        if known is not None and known.facts is not None and time.monotonic() - known.read_at <= max_age_seconds:
            return known.facts
        card = await self.cards.get(alias)
        known = self._known[alias]  # of models that there are alone: names are free to invent
        async with known.lock:
            if known.facts is None or time.monotonic() - known.read_at > max_age_seconds:
                # Runs first: an item that moves to the queue meanwhile is counted twice, and never not at all.
                num_unfed = await self._num_unfed(alias, max_age_seconds)
                numbers = await self.store.lanes(alias)
                loads = await asyncio.gather(*map(self.store.load, numbers))
                known.facts = Facts(
                    loads=dict(zip(numbers, loads, strict=True)),
                    workers=await self.store.workers(alias),
                    pace=eta.pace_of_card(card),
                    cold_start_seconds=card.cold_start_seconds or 0.0,
                    max_workers=card.max_workers,
                    num_unfed=num_unfed,
                )
                known.read_at = time.monotonic()
            return known.facts

    async def _num_unfed(self, alias: str, max_age_seconds: float) -> int:
        age_seconds = time.monotonic() - self._unfed_read_at
        if self.runs is not None and age_seconds > (UNFED_SECONDS if max_age_seconds else 0.0):
            self._unfed, self._unfed_read_at = await self.runs.unfed(), time.monotonic()
        return self._unfed.get(alias, 0)


def work_of(job: Job) -> Work:
    """What a waiting job is thought to come to."""
    output_tokens = min(job.cost_tokens, job.spec.output_tokens)
    return Work(job.cost_tokens - output_tokens, output_tokens)
