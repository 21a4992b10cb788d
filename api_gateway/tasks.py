"""Ending tasks for sure."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_SECONDS = 0.5


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks until they have ended.

    Once is not enough: before Python 3.12 `asyncio.wait_for`, which redis-py sends through, may lose a cancellation.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=AGAIN_SECONDS)
