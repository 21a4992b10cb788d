"""The dispatcher: tells the outside what happened. Relays outboxes (webhooks, steps of runs), and sweeps lanes.

Any number of dispatchers may run: what one has taken is hidden from the others for a while, and returns if it dies.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from infra.contracts import Notice
from infra.errors import MillstreamError, StoreUnavailable
from infra.runs import RunHeader, RunStore
from infra.settings import DispatcherSettings, StoreSettings
from infra.store import JobStore
from worker.runs.relay import StepRelay
from worker.webhooks import event
from worker.webhooks.outbox import Courier, Done

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
MAX_POLL_SECONDS = 2.0  # while the store does not answer
MAX_NOTICES = 100  # taken from a lane at once
LANES_SECONDS = 2.0  # a new lane is noticed within so long


class Dispatcher:
    def __init__(self, store: JobStore, runs: RunStore, relay: StepRelay, courier: Courier,
                 settings: DispatcherSettings) -> None:  # fmt: skip
        self._store = store
        self._runs = runs
        self._relay = relay
        self._courier = courier
        self._settings = settings
        self._lanes: Sequence[int] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`: then what is being delivered is finished first."""
        loops = [
            self._every(POLL_SECONDS, stop, self.relay_outboxes),
            self._every(POLL_SECONDS, stop, self.relay_runs),
            self._every(LANES_SECONDS, stop, self.find_lanes),
            self._every(self._settings.sweep_seconds, stop, self.sweep),
        ]
        await self.find_lanes()
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop)
        await asyncio.gather(*self._tasks)

    async def find_lanes(self) -> None:
        self._lanes = await self._store.lanes()

    async def sweep(self) -> None:
        for lane in self._lanes:
            swept = await self._store.sweep(lane)
            if swept.expired or swept.failed:
                log.info("lane %d: %d jobs expired, %d failed", lane, len(swept.expired), len(swept.failed))

    async def relay_outboxes(self) -> None:
        """Takes the ripe notices of every lane; runs are told at once, endpoints as their slots allow."""
        for lane in self._lanes:
            notices = await self._store.take_notices(
                lane, limit=MAX_NOTICES, hide_seconds=self._settings.notice_hide_seconds
            )
            if for_runs := [notice for notice in notices if notice.topic == "run"]:
                self._spawn(self._relay.relay(for_runs))
            for notice in notices:
                if notice.topic == "webhook":
                    self._begin_delivery(notice)

    def _begin_delivery(self, notice: Notice) -> None:
        message = event.of_notice(notice, public_url=self._settings.public_url)

        async def done() -> None:
            await self._store.delete_notice(notice)

        async def later(after_seconds: float) -> None:
            await self._store.delay_notice(notice, delay_seconds=after_seconds)

        self._begin(message, done, later)

    async def relay_runs(self) -> None:
        await self._relay.look_at_clock(self._begin_run_delivery)

    def _begin_run_delivery(self, header: RunHeader) -> bool:
        message = event.of_run(header, public_url=self._settings.public_url)
        if message is None:
            return False
        run_id = header.run.id

        async def done() -> None:
            await self._runs.rest(run_id)

        async def later(after_seconds: float) -> None:
            await self._runs.delay(run_id, delay_seconds=after_seconds)

        self._begin(message, done, later)
        return True

    def _begin(self, message: event.Message, done: Callable[[], Awaitable[None]],
               later: Callable[[float], Awaitable[None]]) -> None:  # fmt: skip
        """Tells a message if its endpoint has a free slot, else puts it back for a moment."""

        async def tell() -> None:
            told = await self._courier.tell(message)
            await (done() if isinstance(told, Done) else later(told.after_seconds))

        if self._courier.try_take(message):
            self._spawn(tell())
        else:
            self._spawn(later(self._courier.patience_seconds(message)))

    def _spawn(self, work: Awaitable[None]) -> None:
        """One notice's work. Whatever goes wrong there, its notice returns, and the others go on."""

        async def guarded() -> None:
            try:
                await work
            except StoreUnavailable as error:
                log.warning("left for later, when its notice returns: %s", error)
            except Exception:
                log.exception("left for later, when its notice returns")

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _every(self, seconds: float, stop: asyncio.Event, work: Callable[[], Awaitable[None]]) -> None:
        """Repeats `work` with a pause between; the pause grows while the store does not answer."""
        pause = seconds
        while not stop.is_set():
            try:
                await work()
                pause = seconds
            except StoreUnavailable as error:
                pause = max(seconds, min(2 * pause, MAX_POLL_SECONDS))
                log.warning("the store does not answer, trying again in %.1f s: %s", pause, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
