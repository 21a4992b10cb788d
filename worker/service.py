"""A worker, put together: an engine in its thread, leases in theirs, everything else in the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidConfig, ModelLoadError
from infra.blobs import Blobs
from infra.contracts import Hold, Pace, WorkerRecord
from infra.errors import MillstreamError
from infra.settings import WorkerSettings
from infra.store import JobStore
from infra.telemetry import Telemetry
from worker.bridge import Bridge
from worker.capacity import free_tokens
from worker.card import CardKeeper, card_of, profile_of, put_tokenizer
from worker.consumer import Consumer
from worker.drain import drain
from worker.engine_thread import EngineThread, Report
from worker.lease import LeaseKeeper
from worker.metrics import Metrics
from worker.observer import Observer, Observers
from worker.pace import PaceMeter
from worker.payloads import Payloads
from worker.pulse import Pulse
from worker.rates import Rates
from worker.signals import Stopping
from worker.told import Teller, record_of
from worker.traces import Traces
from worker.watchdog import until_hung

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.stats import EngineStats

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
ENGINE_STOP_SECONDS = 4.0
CANCEL_SECONDS = 0.5

OpenStore = Callable[[], Coroutine[Any, Any, JobStore]]


class EngineHung(Exception):
    """Its thread cannot be ended, so the process must be."""

    def __init__(self) -> None:
        super().__init__("the engine has finished no step for too long")


class Worker:
    """To be made in a running event loop, and served once. `open_store` gives a connection of its own at each call."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        open_store: OpenStore,
        blobs: Blobs,
        load: Callable[[], LLM],
        telemetry: Telemetry | None = None,
    ) -> None:
        self.bridge: Bridge | None = None  # while it serves
        self.stats: EngineStats  # as of the engine's last report
        self.is_stuck = False  # the engine's thread would not end; it must end with the process
        self._settings = settings
        self._open_store = open_store
        self._blobs = blobs
        self._telemetry = telemetry or Telemetry()
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._bell = asyncio.Event()  # there may be something to claim
        self._pulse = Pulse()  # of the event loop
        self._meter = PaceMeter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[LLM] = self._loop.create_future()
        self._broken: asyncio.Future[BaseException] = self._loop.create_future()
        self._engine = EngineThread(
            load,
            ready=self._in_loop(self._loaded.set_result),
            deliver=self._in_loop(self._on_report),
            fail=self._in_loop(self._on_engine_failure),
        )
        self._leases = LeaseKeeper(
            open_store,
            lease_seconds=settings.lease_seconds,
            renew_seconds=settings.renew_seconds,
            is_stalled=self._is_stalled,
            lost=self._in_loop(self._on_lost),
            fail=self._in_loop(self._break),
        )

    async def serve(self, stopping: Stopping) -> bool:
        """Works until told to stop. True where nothing broke and every job was finished or handed over.

        Raises what loading the model raises, and StoreUnavailable or StoreUnsuitable where there is no store to begin
        with.
        """
        began = time.monotonic()
        self._loop.set_exception_handler(self._on_loop_error)
        store = await self._open_store()
        try:
            self._engine.start()
            llm = await self._load(stopping)
            if llm is not None:
                await self._serve(store, llm, stopping, began)
        finally:
            self.is_stuck = not await asyncio.to_thread(self._engine.stop, timeout_seconds=ENGINE_STOP_SECONDS)
            await store.close()
        return not self._broken.done() and (self.bridge is None or self.bridge.is_empty.is_set())

    async def _load(self, stopping: Stopping) -> LLM | None:
        """The engine, once it is there; None where the worker is told to stop meanwhile."""
        await self._first(stopping, self._loaded)
        if self._broken.done():
            raise self._broken.result()
        return self._loaded.result() if self._loaded.done() else None

    async def _serve(self, store: JobStore, llm: LLM, stopping: Stopping, began: float) -> None:
        alias = self._settings.alias or llm.info.name
        self.stats = llm.stats()
        await put_tokenizer(self._blobs, llm.info, llm.tokenizer)
        created_ms = time.time_ns() // 1_000_000
        card = CardKeeper(
            store,
            card_of(
                alias,
                llm.info,
                llm.tokenizer,
                created_ms=created_ms,
                cold_start_seconds=self._settings.cold_start_seconds + time.monotonic() - began,
                max_workers=self._settings.max_workers or None,
            ),
            rates=lambda: Rates.of_stats(self.stats, self._pace),
        )
        lane = await store.open_lane(alias)
        await card.put()
        metrics = Metrics(alias, lambda: self.stats)
        with metrics.served(self._settings.metrics_port):
            bridge = self.bridge = self._bridge(store, llm, Observers([metrics, Traces(self._telemetry)]))
            consumer = self._consumer(store, bridge, alias, profile_of(llm.info))
            teller = Teller(store, lambda: self._record(alias, bridge, consumer))
            self._leases.start()
            try:
                for work in (self._beat(), self._watch_engine(), card.refresh(), consumer.listen(), teller.run()):
                    self._spawn(work)
                claiming = self._spawn(consumer.claim_until_stopped())
                print(f"worker ready: alias={alias} lane={lane} in {time.monotonic() - began:.1f} s", flush=True)
                await self._until_stopped(stopping)
                consumer.stop()
                await asyncio.wait([claiming])
                await drain(bridge, drain_seconds=self._settings.drain_seconds, hurry=stopping.hurry)
                log.info("drained: %d tokens were generated here", self.stats.num_generated_tokens)
            finally:
                await asyncio.to_thread(self._leases.stop)
                await self._end_tasks()
                await teller.forget()

    def _bridge(self, store: JobStore, llm: LLM, observer: Observer) -> Bridge:
        return Bridge(
            store=store,
            engine=self._engine,
            leases=self._leases,
            payloads=Payloads(self._blobs),
            tokenizer=llm.tokenizer,
            grammars=llm.grammars,
            profile=profile_of(llm.info),
            observer=observer,
            spawn=self._spawn,
            flush_seconds=self._settings.flush_seconds,
            bell=self._bell,
        )

    def _consumer(self, store: JobStore, bridge: Bridge, alias: str, profile: str) -> Consumer:
        return Consumer(
            store,
            bridge,
            alias=alias,
            owner=self._owner,
            profile=profile,
            lease_seconds=self._settings.lease_seconds,
            free_tokens=lambda: 0 if self._is_stalled() else free_tokens(self.stats, bridge.attempts.values()),
            bell=self._bell,
        )

    @property
    def _pace(self) -> Pace | None:
        stats = self.stats
        return self._meter.pace(num_seats=stats.max_num_seqs, kv_tokens=stats.num_kv_blocks * stats.block_size)

    def _record(self, alias: str, bridge: Bridge, consumer: Consumer) -> WorkerRecord:
        return record_of(
            self._owner,
            alias,
            consumer.lanes,
            self.stats,
            bridge.attempts.values(),
            pace=self._pace,
            takes_jobs=not (consumer.is_stopping or self._is_stalled()),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs beside everything else; what it raises stops the worker, and the worker's end cancels it."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._break(error)

        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    async def _end_tasks(self) -> None:
        """Cancels what still runs, again and again: a library may swallow a cancellation that comes at a bad moment."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=CANCEL_SECONDS)

    async def _until_stopped(self, stopping: Stopping) -> None:
        """Returns when told to, or when a part broke: then there is nothing to wait for."""
        await self._first(stopping)
        if self._broken.done():
            stopping.hurry.set()

    async def _first(self, stopping: Stopping, *others: asyncio.Future[Any]) -> None:
        """Returns when told to stop, when a part broke, or when one of the others is there."""
        told = asyncio.ensure_future(stopping.told.wait())
        waiting: list[asyncio.Future[Any]] = [told, self._broken, *others]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()

    async def _beat(self) -> None:
        while True:
            self._pulse.beat()
            await asyncio.sleep(BEAT_SECONDS)

    async def _watch_engine(self) -> None:
        """A hung engine's leases have lapsed by then: another worker has its jobs, and this process is of no use."""
        await until_hung(self._engine.pulse, after_seconds=self._settings.stall_seconds + self._settings.lease_seconds)
        self._on_engine_failure(EngineHung())

    def _is_stalled(self) -> bool:
        """Whether this worker gets nowhere: then it renews no lease and claims nothing. Any thread may ask."""
        return max(self._engine.pulse.silent_seconds, self._pulse.silent_seconds) > self._settings.stall_seconds

    # --- called in the loop, from wherever ---

    def _in_loop(self, function: Callable[[Any], object]) -> Callable[[Any], None]:
        """`function`, to be called from another thread: runs in the event loop, the caller does not wait."""

        def call(argument: Any) -> None:
            self._loop.call_soon_threadsafe(function, argument)

        return call

    def _on_report(self, report: Report) -> None:
        self.stats = report.stats
        self._meter.note(report.stats, report.busy_seconds)
        if self.bridge is not None:
            self.bridge.report(report)

    def _on_lost(self, holds: list[Hold]) -> None:
        if self.bridge is not None:
            self.bridge.drop_holds(holds)

    def _on_engine_failure(self, error: BaseException) -> None:
        if self.bridge is not None:
            self.bridge.engine_failed(error)
        self._break(error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if isinstance(error := context.get("exception"), BaseException):
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """This worker cannot go on; the first reason counts."""
        if not self._broken.done():
            is_told = isinstance(error, (ModelLoadError, InvalidConfig, MillstreamError))  # an operator can mend these
            log.critical("the worker stops: %s", error, exc_info=None if is_told else error)
            self._broken.set_result(error)
