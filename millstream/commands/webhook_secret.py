"""`millstream webhook-secret`"""

from __future__ import annotations

import asyncio

from infra.settings import DispatcherSettings, StoreSettings
from millstream.flags import takes_settings
from millstream.stack.address import joining


@takes_settings
def webhook_secret(store: StoreSettings, settings: DispatcherSettings) -> int:
    """Prints the secret that webhooks are signed with (whsec_…), for their receivers to verify them by. It is made at
    the first call of any process, unless one is given with --webhook-secret.
    """
    print(settings.webhook_secret or asyncio.run(_kept_secret(joining(store).server_url)))
    return 0


async def _kept_secret(url: str) -> str:
    from worker.webhooks.ledger import Ledger

    ledger = Ledger.open(url)
    try:
        return await ledger.secret()
    finally:
        await ledger.close()
