"""Sweeps all lanes, again and again, for whichever process has the time: a gateway, a dispatcher.

A watch says that somebody waits for a job, and a store that was away has heard from nobody. So a sweeper notes since
when each lane's server has answered it without a break, and lets only those watches be judged that are shorter than
that: a gateway that lives has renewed its own by then.

    server   ──answers──┤  away  ├──answers─────────────────────────────>
    watches             ·        ├─ renewed ─·
    judged   ──────────>·        ·<──── a watch's time ────>├──────────>
"""

from __future__ import annotations

import time
from collections.abc import Callable

from infra.errors import StoreUnavailable
from infra.store import JobStore, Sweep


class Sweeper:
    """One process's sweeps."""

    def __init__(self, store: JobStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self._store = store
        self._clock = clock
        self._answers_since: dict[int, float] = {}  # by lane; none where it did not answer last, or was never asked

    async def sweep(self) -> Sweep:
        """Sweeps every lane once; what was ended in all of them.

        Raises the first lane's StoreUnavailable, but only after all: in a Cluster, other servers may answer.
        """
        swept, failure = Sweep(), None
        for lane in await self._lanes():
            since = self._answers_since.get(lane, self._clock())
            try:
                found = await self._store.sweep(lane, steady_seconds=self._clock() - since)
            except StoreUnavailable as error:
                self._answers_since.pop(lane, None)
                failure = failure or error
                continue
            self._answers_since[lane] = since
            swept.expired.extend(found.expired)
            swept.failed.extend(found.failed)
            swept.cancelled.extend(found.cancelled)
        if failure is not None:
            raise failure
        return swept

    async def _lanes(self) -> list[int]:
        try:
            return await self._store.lanes()
        except StoreUnavailable:
            self._answers_since.clear()  # what the lanes' servers did meanwhile, nobody knows
            raise
