"""`millstream gateway`"""

from __future__ import annotations

from infra.settings import GatewaySettings, QueueSettings, StoreSettings
from millstream.flags import takes_settings
from millstream.stack.address import joining


@takes_settings
def gateway(store: StoreSettings, queue: QueueSettings, settings: GatewaySettings) -> int:
    """Serves HTTP: jobs, runs, the OpenAI-compatible routes, event streams."""
    from api_gateway.main import run

    return run(joining(store), settings, queue=queue)
