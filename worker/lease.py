"""Leases are renewed from a thread of its own with a store connection of its own.

So neither a long step of the engine nor a busy event loop can let a live lease lapse. What should let it lapse does:
while no step finishes for `stall_seconds`, nothing is renewed, and another worker takes over.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from infra.contracts import Hold
from infra.errors import StoreUnavailable
from infra.keys import lane_of
from infra.store import JobStore

log = logging.getLogger(__name__)


class LeaseKeeper:
    """The holds of this worker, and the thread that renews them.

    `lost` and `fail` are called in the thread: with holds that are no longer good, and with what ended the thread.
    """

    def __init__(
        self,
        open_store: Callable[[], Coroutine[Any, Any, JobStore]],
        *,
        lease_seconds: float,
        renew_seconds: float,
        is_stalled: Callable[[], bool],
        lost: Callable[[list[Hold]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        if not 0 < renew_seconds < lease_seconds:
            raise ValueError(f"renew_seconds must be under lease_seconds: {renew_seconds} against {lease_seconds}")
        self._open_store = open_store
        self._lease_seconds = lease_seconds
        self._renew_seconds = renew_seconds
        self._is_stalled = is_stalled
        self._was_stalled = False
        self._lost = lost
        self._fail = fail
        self._holds: dict[str, Hold] = {}  # by job id; under the lock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; what is still held lapses by itself."""
        self._stop.set()
        self._thread.join()

    def hold(self, hold: Hold) -> None:
        with self._lock:
            self._holds[hold.job_id] = hold

    def drop(self, hold: Hold) -> None:
        """Forgets a hold. A newer attempt of the same job, claimed by this same worker, stays."""
        with self._lock:
            if self._holds.get(hold.job_id) == hold:
                del self._holds[hold.job_id]

    def _main(self) -> None:
        try:
            with asyncio.Runner() as runner:
                store = runner.run(self._open_store())
                try:
                    pause = self._renew_seconds
                    while not self._stop.wait(pause):
                        all_renewed = runner.run(self._renew(store))
                        pause = self._renew_seconds if all_renewed else min(1.0, self._renew_seconds / 4)
                finally:
                    runner.run(store.close())
        except BaseException as error:
            self._fail(error)

    async def _renew(self, store: JobStore) -> bool:
        """One round over all holds. False where the store could not be asked about some."""
        by_lane = defaultdict[int, list[Hold]](list)
        with self._lock:
            for hold in self._holds.values():
                by_lane[lane_of(hold.job_id)].append(hold)
        was_stalled, self._was_stalled = self._was_stalled, bool(by_lane) and self._is_stalled()
        if self._was_stalled:
            if not was_stalled:
                log.error("leases not renewed: no step has finished for too long; another worker will take over")
            return True
        return all(await asyncio.gather(*(self._renew_lane(store, lane, holds) for lane, holds in by_lane.items())))

    async def _renew_lane(self, store: JobStore, lane: int, holds: list[Hold]) -> bool:
        try:
            async with asyncio.timeout(self._renew_seconds):
                lost = await store.renew(lane, holds, lease_seconds=self._lease_seconds)
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("leases of lane %d not renewed, the store does not answer: %s", lane, error)
            return False
        if lost:
            self._lost(lost)
        return True
