"""The orderly end of a worker: nothing is lost, nothing is repeated."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from worker.bridge import Bridge

log = logging.getLogger(__name__)

HAND_OVER_SECONDS = 8.0  # for the step under way and for writing what is left; well under the grace that a chart adds


async def drain(bridge: Bridge, *, drain_seconds: float, hurry: asyncio.Event) -> bool:
    """Lets jobs finish for `drain_seconds`, or until `hurry`; gives the rest back with all progress published.

    Claiming must have stopped. False: some could be neither finished nor given back (the store is away, or the engine
    hangs); their leases lapse, and they go on elsewhere from what was published.
    """
    num_running = len(bridge.attempts)
    hurried = asyncio.ensure_future(hurry.wait())
    emptied = asyncio.ensure_future(bridge.is_empty.wait())
    try:
        await asyncio.wait({hurried, emptied}, timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        num_left = len(bridge.attempts)
        log.info("drain: %d jobs finished, %d to be handed over", num_running - num_left, num_left)
        bridge.hand_over_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(emptied, HAND_OVER_SECONDS)
    finally:
        hurried.cancel()
        emptied.cancel()
    if bridge.attempts:
        log.error("drain: %d jobs could not be handed over; their leases will lapse", len(bridge.attempts))
    return not bridge.attempts
