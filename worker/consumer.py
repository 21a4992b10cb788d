"""Claims jobs: one at a time, only what the engine can run now, nothing kept for later.

Two loops: one waits at the store's doorbell and hears of jobs that have ended elsewhere; the other claims whenever the
bell rang, be it for new work or because room was made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from infra.contracts import Claim
from infra.errors import StoreUnavailable, SuspectWaits
from infra.losses import Losses
from infra.store import JobStore
from worker.backoff import Backoff
from worker.bridge import Bridge

log = logging.getLogger(__name__)

DOORBELL_SECONDS = 2.0  # one wait at the doorbell; after it the lanes are looked at again in any case
LANES_SECONDS = 2.0  # how often the alias's lanes are read anew


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
        self._suspects_lane: int | None = None  # whose suspect waits until nothing runs here
        self._calls = count()
        self._unanswered: dict[int, str] = {}  # lane -> name of the claim that may have started a job there

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
        if self._unanswered:  # one more try to hear of it, so that the drain can hand it over
            with suppress(StoreUnavailable):
                if (claim := await self._claim()) is not None:
                    self._bridge.take(claim)

    async def _claim(self) -> Claim | None:
        """A job from the first lane that has one which fits; the lanes take turns at being first.

        Raises StoreUnavailable where a lane's server does not answer and no other lane has such a job.
        A suspect has the worker to itself; where one waits for this worker to make room, nothing else is claimed.
        A claim whose answer was lost comes before all others, under its old name: what it had started is ours.
        """
        attempts = self._bridge.attempts
        has_suspect = any(Losses.of(attempt.job).is_suspect for attempt in attempts.values())
        self.lanes = self.lanes[1:] + self.lanes[:1]
        unavailable: StoreUnavailable | None = None
        for lane in sorted(self.lanes, key=lambda lane: (lane not in self._unanswered, lane != self._suspects_lane)):
            free_tokens = 0 if has_suspect else self._free_tokens()
            if free_tokens == 0 and lane not in self._unanswered and (has_suspect or lane != self._suspects_lane):
                return None
            call = self._unanswered.setdefault(lane, str(next(self._calls)))
            try:
                claim = await self._store.claim(
                    lane,
                    self._owner,
                    free_tokens=free_tokens,
                    lease_seconds=self._lease_seconds,
                    profile=self._profile,
                    alone=not attempts,
                    call=call,
                )
            except SuspectWaits:
                del self._unanswered[lane]
                self._suspects_lane = lane
                return None
            except StoreUnavailable as error:  # in a Cluster, another lane's server may well answer
                unavailable = error
                continue
            del self._unanswered[lane]
            if lane == self._suspects_lane:
                self._suspects_lane = None
            if claim is not None:
                return claim
        if unavailable is not None:
            raise unavailable
        return None
