"""The pipelines process: a Celery worker that runs the steps of runs.

Celery's threads wait; the work itself is asynchronous and goes on in one event loop beside them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import msgspec
from celery import Celery
from celery.exceptions import SecurityWarning
from celery.signals import worker_ready

from infra.blobs import open_blobs
from infra.contracts import Notice
from infra.errors import MillstreamError
from infra.jobs import RedisJobs
from infra.runs.redis import RedisRuns
from infra.settings import PipelineSettings, QueueSettings, StoreSettings
from worker.health import health_served
from worker.runs.app import ADVANCE, SPLIT, StepSender, make_app
from worker.runs.steps import RunSteps

log = logging.getLogger(__name__)

NUM_THREADS = 4  # steps at a time; each mostly waits for the store

T = TypeVar("T")


def run(store_settings: StoreSettings, settings: PipelineSettings, *, queue: QueueSettings | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Exit code: 0 after a clean stop, 1 where it could not start."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    loop = StepLoop()
    try:
        app = make_app(settings.celery_url or store_settings.server_url)
        steps = loop.start(store_settings, settings, StepSender(app), queue=queue)
        add_tasks(app, loop, steps)
        return serve(app)
    except (MillstreamError, ValueError) as error:
        print(f"pipelines: {error}", file=sys.stderr)
        return 1
    finally:
        loop.stop()


def serve(app: Celery) -> int:
    """A Celery worker in this thread, the process's main one, until a signal ends it."""
    # Celery warns a root user of pickled messages, which are not accepted here.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    worker = app.Worker(
        pool="threads",
        concurrency=NUM_THREADS,
        loglevel="WARNING",
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker_ready.connect(_say_ready)
    worker.start()
    return int(worker.exitcode or 0)


def _say_ready(**_: Any) -> None:
    print("pipelines ready", flush=True)


def add_tasks(app: Celery, loop: StepLoop, steps: RunSteps) -> None:
    """Registers the two steps. A step that fails says so in the log; the clock of runs sends it again."""

    def advance(run_id: str, notices: list[dict[str, Any]]) -> None:
        with _failures_logged(run_id):
            loop.call(lambda: steps.advance(run_id, msgspec.convert(notices, list[Notice])))

    def split(run_id: str, number: int) -> None:
        with _failures_logged(run_id):
            loop.call(lambda: steps.split(run_id, number))

    app.task(name=ADVANCE)(advance)
    app.task(name=SPLIT)(split)


@contextmanager
def _failures_logged(run_id: str) -> Iterator[None]:
    """One line for what is expected to pass: a store or a blob store that is away, a model that no worker serves yet.

    Anything else is Celery's to log, with its traceback. Either way the notices stay, and the step comes again.
    """
    try:
        yield
    except MillstreamError as error:
        log.warning("run %s waits: %s", run_id, error)


class StepLoop:
    """An event loop in a thread of its own, with the connections of the steps."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="steps", daemon=True)
        self._stack = AsyncExitStack()

    def start(
        self,
        store_settings: StoreSettings,
        settings: PipelineSettings,
        sender: StepSender,
        *,
        queue: QueueSettings | None = None,
    ) -> RunSteps:
        """Raises StoreUnavailable, StoreUnsuitable, CannotListen, ValueError."""
        self._thread.start()
        return self.call(lambda: self._open(store_settings, settings, sender, queue))

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` in the loop and waits for it, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.call(self._stack.aclose)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def _open(
        self,
        store_settings: StoreSettings,
        settings: PipelineSettings,
        sender: StepSender,
        queue: QueueSettings | None,
    ) -> RunSteps:
        store = await RedisJobs.connect(store_settings.server_url, settings=queue, kept=store_settings)
        self._stack.push_async_callback(store.close)
        health = health_served(settings.pipelines_health_port, store, setting="pipelines_health_port")
        await self._stack.enter_async_context(health)
        runs = RedisRuns.open(store_settings.server_url)
        self._stack.push_async_callback(runs.close)
        return RunSteps(
            store,
            runs,
            open_blobs(store_settings.blobs),
            window=settings.run_window,
            roots=[root for root in (*settings.file_roots.split(":"), *settings.s3_roots.split(",")) if root],
            ask_split=sender.split,
        )
