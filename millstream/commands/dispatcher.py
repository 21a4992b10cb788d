"""`millstream dispatcher`"""

from __future__ import annotations

from infra.settings import DispatcherSettings, QueueSettings, StoreSettings
from millstream.flags import takes_settings
from millstream.stack.address import joining


@takes_settings
def dispatcher(store: StoreSettings, queue: QueueSettings, settings: DispatcherSettings) -> int:
    """Relays the outbox: delivers webhooks, wakes the steps of runs, sweeps what is past its time."""
    from worker.dispatcher import run

    return run(joining(store), settings, queue=queue)
