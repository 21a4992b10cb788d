"""Notices an engine that hangs: its thread cannot be ended, so its process must be."""

from __future__ import annotations

import asyncio

from worker.pulse import Pulse

TICK_SECONDS = 1.0


async def until_hung(pulse: Pulse, *, after_seconds: float) -> None:
    """Returns once one turn of the loop behind `pulse` has lasted `after_seconds` while we looked on.

    Counted in ticks, not by the clock: a process that was stopped and continued has not hung.
    """
    num_ticks = 0
    last = pulse.num_beats
    while num_ticks * TICK_SECONDS < after_seconds:
        await asyncio.sleep(TICK_SECONDS)
        num_ticks = num_ticks + 1 if pulse.num_beats == last and not pulse.is_resting else 0
        last = pulse.num_beats
