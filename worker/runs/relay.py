"""Sends the steps that runs want: because a child job ended (a notice), or because the clock of runs says so."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kombu.exceptions import OperationalError

from infra.contracts import Notice
from infra.runs import RunHeader, RunStore
from worker.runs.app import StepSender

log = logging.getLogger(__name__)

MAX_RUNS = 100  # taken from the clock at once


class StepRelay:
    """Sending waits for the broker in a thread of its own, so that a broker that hangs holds no webhook."""

    def __init__(self, runs: RunStore, sender: StepSender, *, hide_seconds: float) -> None:
        """An open run comes up again every `hide_seconds`, whatever was lost."""
        self._runs = runs
        self._sender = sender
        self._hide_seconds = hide_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")

    async def relay(self, notices: Sequence[Notice]) -> None:
        """One step for each run named. The notices stay in the outbox: the step deletes them."""
        by_run: dict[str, list[Notice]] = defaultdict(list)
        for notice in notices:
            if notice.run_item is None:
                raise ValueError(f"notice {notice.id} names no run")
            by_run[notice.run_item.run_id].append(notice)
        for run_id, its_notices in by_run.items():
            if not await self._try_advance(run_id, its_notices):
                return

    async def look_at_clock(self, tell_end: Callable[[RunHeader], bool]) -> int:
        """Sends a step for each run whose time has come; returns how many came up.

        A run that has ended, with no job left in the queue, needs only to be told to the outside: `tell_end` says
        whether there is anybody to tell, and sees to it.
        """
        due = await self._runs.take_due(limit=MAX_RUNS, hide_seconds=self._hide_seconds)
        for run_id in due:
            header = await self._runs.header(run_id)
            if header is not None and (not header.is_finished or await self._runs.in_flight(run_id)):
                if not await self._try_advance(run_id):
                    break
            elif header is None or not tell_end(header):
                await self._runs.rest(run_id)
        return len(due)

    async def _try_advance(self, run_id: str, notices: Sequence[Notice] = ()) -> bool:
        """False where the broker does not take steps now: the rest need not try, what was taken comes up again."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._sender.advance, run_id, notices)
        except OperationalError as error:
            log.warning("run %s and others wait: their steps cannot be sent: %s", run_id, error)
            return False
        return True

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._sender.close()
