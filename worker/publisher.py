"""Writes what the engine emits: all jobs' tokens of a flush in one fenced call per lane, and each job's end.

While the store is away everything is kept and written in order when it is back, up to the loss of the lease. Nothing is
written twice: publications carry their event number, commits their attempt, so a call whose reply was lost is repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

from infra.contracts import Hold, Publication
from infra.errors import Conflict
from infra.store import JobStore
from worker.attempt import Attempt, Commit, GiveBack, Phase
from worker.backoff import until_answered

log = logging.getLogger(__name__)


class Listener(Protocol):
    def attempt_refused(self, attempt: Attempt) -> None:
        """The store takes no more from this attempt: cancelled, expired, or claimed by another."""
        ...

    def attempt_ended(self, attempt: Attempt) -> None:
        """Its end is written."""
        ...


class Spawn(Protocol):
    """Runs a coroutine beside the caller; what it raises ends the worker."""

    def __call__(self, work: Coroutine[Any, Any, None]) -> object: ...


class LanePublisher:
    """The way to one lane. One publish call is under way at a time, so a job's events keep their order."""

    def __init__(self, store: JobStore, lane: int, listener: Listener, spawn: Spawn, *, flush_seconds: float) -> None:
        self._store = store
        self._lane = lane
        self._listener = listener
        self._spawn = spawn
        self._flush_seconds = flush_seconds
        self._touched: dict[str, Attempt] = {}  # by request id
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()

    def touch(self, attempt: Attempt) -> None:
        """This attempt has something to be written: deltas, or its end."""
        self._touched[attempt.request_id] = attempt
        self._wake.set()
        if attempt.is_silent:
            self._hurry.set()

    async def run(self) -> None:
        """Flushes at once after a silence, at most every `flush_seconds` under load, but for first tokens, which wait
        for nothing. Runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._hurry.clear()
            touched, self._touched = list(self._touched.values()), {}
            await self._flush([attempt for attempt in touched if not attempt.is_over])
            with suppress(TimeoutError):
                async with asyncio.timeout(self._flush_seconds):
                    await self._hurry.wait()

    async def _flush(self, attempts: list[Attempt]) -> None:
        publications: list[tuple[Attempt, Publication]] = []
        giving_back: list[tuple[Attempt, GiveBack]] = []
        for attempt in attempts:
            if attempt.phase is Phase.ENDING and attempt.end is None:
                continue  # its last deltas wait for its end, which is being prepared
            match attempt.end:
                case Commit() as commit:  # takes its last deltas along
                    self._spawn(self._commit(attempt, commit))
                    continue
                case GiveBack() as give_back:
                    giving_back.append((attempt, give_back))
            if publication := attempt.take_publication():
                publications.append((attempt, publication))
        await self._publish(publications)
        for attempt, give_back in giving_back:
            if not attempt.is_over:
                self._spawn(self._give_back(attempt, give_back))

    async def _publish(self, publications: list[tuple[Attempt, Publication]]) -> None:
        def live() -> list[Publication]:
            return [sent for attempt, sent in publications if not attempt.is_over]

        refused = await until_answered(
            lambda: self._written(live()), is_wanted=lambda: bool(live()), what="a publication"
        )
        for attempt, sent in publications:
            if attempt.is_over or refused is None:
                continue
            if sent.hold in refused:
                self._listener.attempt_refused(attempt)
            else:
                attempt.published()

    async def _written(self, publications: list[Publication]) -> list[Hold]:
        """Writes them; returns the holds refused. A job whose log is shorter than we left it is refused, alone.

        That happens where a server failed over and lost what it had acknowledged. Whoever claims the job next goes on
        from what is there.
        """
        try:
            return await self._store.publish(self._lane, publications)
        except Conflict as error:
            if len(publications) == 1:
                log.error("%s: its event log has lost events: %s", publications[0].hold.job_id, error)
                return [publications[0].hold]
        return [hold for publication in publications for hold in await self._written([publication])]

    async def _committed(self, attempt: Attempt, commit: Commit, last: Publication) -> bool:
        try:
            return await self._store.commit(attempt.hold, commit.outcome, last=last)
        except Conflict as error:
            log.error("%s: its event log has lost events: %s", attempt.job.id, error)
            return False

    async def _commit(self, attempt: Attempt, commit: Commit) -> None:
        last = attempt.take_last_publication()
        is_good = await until_answered(
            lambda: self._committed(attempt, commit, last),
            is_wanted=lambda: not attempt.is_over,
            what=f"the end of {attempt.job.id}",
        )
        self._tell(attempt, is_good)

    async def _give_back(self, attempt: Attempt, give_back: GiveBack) -> None:
        is_good = await until_answered(
            lambda: self._store.release(attempt.hold, reason=give_back.reason, delay_seconds=give_back.delay_seconds),
            is_wanted=lambda: not attempt.is_over,
            what=f"the return of {attempt.job.id}",
        )
        self._tell(attempt, is_good)

    def _tell(self, attempt: Attempt, is_good: bool | None) -> None:
        """Tells the listener how it went; None: the attempt was lost meanwhile, which it knows."""
        if is_good is True:
            self._listener.attempt_ended(attempt)
        elif is_good is False:
            self._listener.attempt_refused(attempt)


class Publisher:
    """One lane publisher per lane, made on first use."""

    def __init__(self, store: JobStore, listener: Listener, spawn: Spawn, *, flush_seconds: float) -> None:
        self._store = store
        self._listener = listener
        self._spawn = spawn
        self._flush_seconds = flush_seconds
        self._lanes: dict[int, LanePublisher] = {}

    def touch(self, attempt: Attempt) -> None:
        lane = self._lanes.get(attempt.lane)
        if lane is None:
            lane = LanePublisher(
                self._store, attempt.lane, self._listener, self._spawn, flush_seconds=self._flush_seconds
            )
            self._lanes[attempt.lane] = lane
            self._spawn(lane.run())
        lane.touch(attempt)
