"""Claims jobs: one at a time, only what the engine can run now, nothing kept for later.

Two loops: one waits at the store's doorbell and hears of jobs that have ended elsewhere; the other claims whenever the
bell rang, be it for new work or because room was made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from infra.contracts import Claim
from infra.endings import SUSPECT_LOST_COUNT
from infra.errors import StoreUnavailable
from infra.store import JobStore
from worker.backoff import Backoff
from worker.bridge import Bridge

log = logging.getLogger(__name__)

DOORBELL_SECONDS = 2.0  # one wait at the doorbell; after it the lanes are looked at again in any case
LANES_SECONDS = 10.0  # how often the alias's lanes are read anew


class Consumer:
    def __init__(
        self,
        store: JobStore,
        bridge: Bridge,
        *,
        alias: str,
        owner: str,
        profile: str,
        lease_seconds: float,
        free_tokens: Callable[[], int | None],
        bell: asyncio.Event,
    ) -> None:
        """`free_tokens` says what may be claimed, as in `JobStore.claim`; 0: nothing now."""
        self._store = store
        self._bridge = bridge
        self._alias = alias
        self._owner = owner
        self._profile = profile
        self._lease_seconds = lease_seconds
        self._free_tokens = free_tokens
        self._bell = bell
        self.lanes: list[int] = []  # of the alias, as read last
        self.is_stopping = False

    def stop(self) -> None:
        """Claims nothing more; `claim_until_stopped` returns once the claim under way is answered and taken."""
        self.is_stopping = True
        self._bell.set()

    async def listen(self) -> None:
        """Waits at the doorbell, until cancelled."""
        backoff = Backoff()
        loop = asyncio.get_running_loop()
        lanes_read_at = -LANES_SECONDS
        while True:
            try:
                if loop.time() - lanes_read_at >= LANES_SECONDS:
                    self.lanes = await self._store.lanes(self._alias)
                    lanes_read_at = loop.time()
                ended = await self._store.wait_for_work(self.lanes, timeout=DOORBELL_SECONDS)
            except StoreUnavailable as error:
                if backoff.is_fresh:
                    log.warning("the store does not answer: %s", error)
                await backoff.pause()
                continue
            backoff.reset()
            self._bridge.drop_jobs(ended)
            self._bell.set()

    async def claim_until_stopped(self) -> None:
        backoff = Backoff()
        while not self.is_stopping:
            await self._bell.wait()
            self._bell.clear()
            try:
                while not self.is_stopping and (claim := await self._claim()) is not None:
                    self._bridge.take(claim)
            except StoreUnavailable:
                await backoff.pause()  # and wait for the next ring: the doorbell rings when the store is back
                continue
            backoff.reset()

    async def _claim(self) -> Claim | None:
        """A job from the first lane that has one which fits; the lanes take turns at being first."""
        self.lanes = self.lanes[1:] + self.lanes[:1]
        for lane in self.lanes:
            free_tokens = self._free_tokens()
            if free_tokens == 0:
                return None
            claim = await self._store.claim(
                lane,
                self._owner,
                free_tokens=free_tokens,
                lease_seconds=self._lease_seconds,
                profile=self._profile,
                suspects=not self._has_suspect,
            )
            if claim is not None:
                return claim
        return None

    @property
    def _has_suspect(self) -> bool:
        """Whether a job that may be what kills workers runs here; there is to be no second."""
        return any(attempt.job.lost_count >= SUSPECT_LOST_COUNT for attempt in self._bridge.attempts.values())
