"""`millstream up`"""

from __future__ import annotations

import signal
from threading import Event
from types import FrameType

from engine.config import EngineConfig
from infra.settings import (
    DispatcherSettings,
    GatewaySettings,
    PipelineSettings,
    QueueSettings,
    StoreSettings,
    WorkerSettings,
)
from millstream.flags import takes_settings
from millstream.stack.settings import UpSettings


@takes_settings
def up(
    up: UpSettings,
    store: StoreSettings,
    queue: QueueSettings,
    gateway: GatewaySettings,
    worker: WorkerSettings,
    engine: EngineConfig,
    dispatcher: DispatcherSettings,
    pipelines: PipelineSettings,
) -> int:
    """Runs everything as one tree of processes until it is interrupted: an embedded server (unless --redis-url names
    one), gateway, workers, dispatcher and pipelines. A process that dies is started again. Jobs survive a restart.
    """
    from millstream.stack.stack import Stack

    stack = Stack(
        store=store,
        queue=queue,
        gateway=gateway,
        worker=worker,
        engine=engine,
        dispatcher=dispatcher,
        pipelines=pipelines,
        up=up,
    )
    interrupted = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            stack.kill()  # asked twice: what still drains is cut short, and continued by the next start
            return
        interrupted = True
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        with stack:
            Event().wait()
    except KeyboardInterrupt:
        print("        up | stopped", flush=True)
    return 0
