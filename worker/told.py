"""What this worker tells the gateways of itself, so that any of them can say how long the queue takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from infra.contracts import Pace, WorkerRecord
from infra.errors import StoreUnavailable
from infra.store import JobStore
from worker.attempt import Attempt, Phase
from worker.capacity import free_tokens

if TYPE_CHECKING:
    from engine.stats import EngineStats

log = logging.getLogger(__name__)

TELL_SECONDS = 0.5
KEEP_SECONDS = 5.0  # a worker that has told nothing for so long is thought to be gone


def record_of(
    owner: str,
    alias: str,
    lanes: Iterable[int],
    stats: EngineStats,
    attempts: Iterable[Attempt],
    *,
    pace: Pace | None,
    takes_jobs: bool,
) -> WorkerRecord:
    """The worker as it is. Pure."""
    attempts = list(attempts)
    under_way = [one for one in attempts if one.phase in (Phase.STARTING, Phase.RUNNING, Phase.LEAVING)]
    free = free_tokens(stats, under_way)
    return WorkerRecord(
        owner=owner,
        alias=alias,
        lanes=sorted(lanes),
        num_seats=stats.max_num_seqs,
        free_tokens=stats.free_tokens if free is None else free,
        num_jobs=len(attempts),
        remaining=sorted(tokens for attempt in under_way for tokens in attempt.remaining_tokens),
        prompt_tokens=sum(attempt.prompt_tokens_left for attempt in under_way),
        pace=pace,
        takes_jobs=takes_jobs,
    )


class Teller:
    """Tells the record again and again, until cancelled."""

    def __init__(self, store: JobStore, record: Callable[[], WorkerRecord]) -> None:
        self._store = store
        self._record = record

    async def run(self) -> None:
        while True:
            try:
                await self._store.put_worker(self._record(), keep_seconds=KEEP_SECONDS)
            except StoreUnavailable as error:
                log.debug("not told: %s", error)  # whoever else asks the store says so louder
            await asyncio.sleep(TELL_SECONDS)

    async def forget(self) -> None:
        """This worker is leaving. Where the store does not answer, it is forgotten a little later."""
        record = self._record()
        try:
            await self._store.drop_worker(record.alias, record.owner)
        except StoreUnavailable as error:
            log.debug("not forgotten at once: %s", error)
