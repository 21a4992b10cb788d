"""The worker process: claims jobs of one model from the queue and runs them in the engine.

store -> consumer -> bridge -> engine thread -> bridge -> publisher -> store
                       ^
                       +--- lease keeper's thread: what is no longer ours
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from typing import TYPE_CHECKING

from engine.errors import EngineError
from infra.blobs import open_blobs
from infra.errors import MillstreamError
from infra.jobs import RedisJobs
from infra.settings import QueueSettings, StoreSettings, WorkerSettings
from infra.telemetry import Telemetry
from worker.service import Worker
from worker.signals import Stopping

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.llm import LLM

log = logging.getLogger(__name__)


def run(
    store_settings: StoreSettings,
    settings: WorkerSettings,
    engine_config: EngineConfig,
    *,
    queue: QueueSettings | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT. Exit code: 0 after a clean drain, 1 where something broke."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    log.info("starting to serve %s", settings.model)
    try:
        return 0 if asyncio.run(_serve(store_settings, settings, engine_config, queue)) else 1
    except (MillstreamError, EngineError) as error:  # what an operator can mend; its message says how
        log.error("the worker cannot serve: %s", error)
        return 1


async def _serve(
    store_settings: StoreSettings, settings: WorkerSettings, engine_config: EngineConfig, queue: QueueSettings | None
) -> bool:
    def load() -> LLM:
        gc.disable()  # what torch's import makes stays; looking for garbage in it, over and over, only takes time
        try:
            from engine.llm import LLM

            return LLM(settings.model, engine_config)
        finally:
            gc.freeze()  # nor is it looked through later
            gc.enable()

    async def open_store() -> RedisJobs:
        return await RedisJobs.connect(store_settings.server_url, settings=queue, kept=store_settings)

    stopping = Stopping()
    stopping.on_signals()
    blobs = open_blobs(store_settings.blobs)
    telemetry = Telemetry.start("worker")
    worker = Worker(settings, open_store=open_store, blobs=blobs, load=load, telemetry=telemetry)
    is_well = False
    try:
        is_well = await worker.serve(stopping)
    finally:
        telemetry.close()
        if worker.is_stuck:
            log.error("the engine's thread is still in a call and cannot be ended; the process ends without it")
            logging.shutdown()
            os._exit(0 if is_well else 1)
    return is_well
