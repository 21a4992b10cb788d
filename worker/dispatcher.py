"""The dispatcher: tells the outside what happened. Relays outboxes (webhooks, steps of runs), and sweeps lanes.

Any number of dispatchers may run: what one has taken is hidden from the others for a while, and returns if it dies.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from infra.blobs import Blobs, open_blobs
from infra.contracts import Notice
from infra.errors import BlobUnavailable, MillstreamError, StoreUnavailable
from infra.jobs import RedisJobs
from infra.runs import RunHeader, RunStore
from infra.runs.redis import RedisRuns
from infra.settings import DispatcherSettings, QueueSettings, StoreSettings
from infra.store import JobStore
from infra.sweeper import Sweeper
from infra.telemetry import Telemetry
from worker.health import health_served
from worker.orphans import delete_orphans
from worker.runs.app import StepSender, make_app
from worker.runs.relay import StepRelay
from worker.signals import Stopping
from worker.webhooks import event, schedule, signing, ssrf
from worker.webhooks.delivery import Sender
from worker.webhooks.ledger import Ledger
from worker.webhooks.outbox import Courier, Done
from worker.webhooks.slots import Slots

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
MAX_POLL_SECONDS = 2.0  # while the store does not answer
MAX_NOTICES = 100  # taken from a lane at once
LANES_SECONDS = 0.5  # a new lane is noticed within so long
STOP_SECONDS = 3.0
ORPHANS_SECONDS = 3600.0  # between two looks at all blobs of jobs


def run(store_settings: StoreSettings, settings: DispatcherSettings, *, queue: QueueSettings | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Exit code: 0 after a clean stop, 1 where it could not start."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log the URLs, and those may hold secrets
    try:
        asyncio.run(_serve(store_settings, settings, queue))
    except (MillstreamError, ValueError) as error:
        print(f"dispatcher: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(store_settings: StoreSettings, settings: DispatcherSettings, queue: QueueSettings | None) -> None:
    stopping = Stopping()
    stopping.on_signals()
    async with opened(store_settings, settings, queue=queue) as dispatcher:
        print("dispatcher ready", flush=True)
        await dispatcher.run(stopping.told)


@asynccontextmanager
async def opened(
    store_settings: StoreSettings, settings: DispatcherSettings, *, queue: QueueSettings | None = None
) -> AsyncIterator[Dispatcher]:
    """A dispatcher with all that it needs, closed afterwards.

    Raises ValueError for a setting that cannot be used, StoreUnavailable or StoreUnsuitable where there is no store.
    """
    waits = schedule.parse(settings.webhook_schedule)
    allowed = ssrf.Allowed.parse(settings.webhook_allow)
    slots = Slots(settings.webhook_concurrency)
    if settings.webhook_secret is not None:
        signing.key_of(settings.webhook_secret)
    url = store_settings.server_url
    async with AsyncExitStack() as stack:
        store = await RedisJobs.connect(url, settings=queue, kept=store_settings)
        stack.push_async_callback(store.close)
        health = health_served(settings.dispatcher_health_port, store, setting="dispatcher_health_port")
        await stack.enter_async_context(health)
        runs = RedisRuns.open(url)
        stack.push_async_callback(runs.close)
        ledger = Ledger.open(url)
        stack.push_async_callback(ledger.close)
        sender = Sender(
            allowed=allowed,
            timeout_seconds=settings.webhook_timeout_seconds,
            concurrency=settings.webhook_concurrency,
        )
        stack.push_async_callback(sender.close)
        steps = StepSender(make_app(settings.celery_url or url))
        relay = StepRelay(runs, steps, hide_seconds=settings.sweep_seconds)
        stack.callback(relay.close)
        secret = settings.webhook_secret or await ledger.secret()
        wait_seconds = settings.notice_hide_seconds / 4  # the rest is for the try itself, and its writing down
        telemetry = Telemetry.start("dispatcher")
        stack.callback(telemetry.close)
        courier = Courier(
            sender, ledger, slots, secrets=[secret], schedule=waits, wait_seconds=wait_seconds, telemetry=telemetry
        )
        yield Dispatcher(store, runs, relay, courier, settings, blobs=open_blobs(store_settings.blobs))


class Dispatcher:
    def __init__(self, store: JobStore, runs: RunStore, relay: StepRelay, courier: Courier,
                 settings: DispatcherSettings, *, blobs: Blobs) -> None:  # fmt: skip
        self._store = store
        self._blobs = blobs
        self._runs = runs
        self._relay = relay
        self._courier = courier
        self._settings = settings
        self._sweeper = Sweeper(store)
        self._lanes: Sequence[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._being_told: set[str] = set()  # webhook ids

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. What is being delivered then has a moment to finish; the rest returns to another dispatcher."""
        loops = [
            self._every(POLL_SECONDS, stop, self.relay_outboxes),
            self._every(POLL_SECONDS, stop, self.relay_runs),
            self._every(LANES_SECONDS, stop, self.find_lanes),
            self._every(self._settings.sweep_seconds, stop, self.sweep),
            self._every(ORPHANS_SECONDS, stop, self.look_for_orphans),
        ]
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop)
        if self._tasks:
            _, unfinished = await asyncio.wait(self._tasks, timeout=STOP_SECONDS)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def find_lanes(self) -> None:
        self._lanes = await self._store.lanes()

    async def sweep(self) -> None:
        swept = await self._sweeper.sweep()
        if swept.expired or swept.failed or swept.cancelled:
            log.info(
                "swept: %d jobs expired, %d failed, %d cancelled, which nobody waited for any more",
                len(swept.expired), len(swept.failed), len(swept.cancelled),
            )  # fmt: skip
        for lane in await self._store.drop_drained():
            log.info("lane %d: closed and empty, and therefore dropped", lane)

    async def _in_each_lane(self, work: Callable[[int], Awaitable[None]]) -> None:
        """Raises the first lane's StoreUnavailable, but only after all: in a Cluster, other servers may answer."""
        failures: list[StoreUnavailable] = []
        for lane in self._lanes:
            try:
                await work(lane)
            except StoreUnavailable as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def look_for_orphans(self) -> None:
        """Begins to; it may take long, and a dispatcher that stops does not wait for it."""
        self._spawn(self._delete_orphans())

    async def _delete_orphans(self) -> None:
        try:
            count = await delete_orphans(self._store, self._blobs)
        except BlobUnavailable as error:
            log.warning("orphaned blobs are left for the next sweep: %s", error)
            return
        if count:
            log.info("%d orphaned blobs deleted", count)

    async def relay_outboxes(self) -> None:
        """Takes the ripe notices of every lane; runs are told at once, endpoints as their slots allow."""
        await self._in_each_lane(self._relay_outbox)

    async def _relay_outbox(self, lane: int) -> None:
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
        if message.id in self._being_told:  # a slow try, and its notice has come back meanwhile
            return
        self._being_told.add(message.id)

        async def tell() -> None:
            try:
                told = await self._courier.tell(message)
                await (done() if isinstance(told, Done) else later(told.after_seconds))
            finally:
                self._being_told.discard(message.id)

        self._spawn(tell())

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
            except Exception:
                stop.set()  # the other loops end too; their cancellation could get lost in a call to the store
                raise
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
