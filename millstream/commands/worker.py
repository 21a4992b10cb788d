"""`millstream worker`"""

from __future__ import annotations

from engine.config import EngineConfig
from infra.settings import QueueSettings, StoreSettings, WorkerSettings
from millstream.flags import takes_settings
from millstream.stack.address import joining


@takes_settings
def worker(store: StoreSettings, queue: QueueSettings, settings: WorkerSettings, engine: EngineConfig) -> int:
    """Claims jobs of one model from the queue and runs them in the engine."""
    from worker.main import run

    return run(joining(store), settings, engine, queue=queue)
