"""Requests whose client waits for the answer: its jobs are cancelled when the client hangs up, and only then.

A gateway that shuts down cancels nothing: the job goes on, and the answer that breaks off names it. One that dies takes
its clients with it. So the store is told who is waited for, and any sweep cancels what nobody has watched for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field

from litestar.types import Receive

from api_gateway.errors import ClientGone, GatewayClosing, JobCancelled, JobExpired, JobFailed
from api_gateway.event_hub import EventHub
from api_gateway.job_book import JobBook
from api_gateway.sse import until_hang_up
from api_gateway.tasks import end
from infra import keys
from infra.contracts import Event, Job, JobError
from infra.errors import MillstreamError, StoreUnavailable
from infra.states import TERMINAL, Status

log = logging.getLogger("millstream.gateway")

LONGEST_SECONDS = 7 * 86400.0
WATCHES_IN_TIME = 4  # so often before a watch would lapse
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Foreground:
    """Who of this gateway's clients waits for which job. Two may wait for one: by the same idempotency key."""

    book: JobBook
    hub: EventHub
    keepalive_seconds: float
    watch_seconds: float
    _watchers: Counter[str] = field(default_factory=Counter)
    _left: set[str] = field(default_factory=set)  # by clients that were sent away: these jobs go on

    async def ends(self, job_ids: Sequence[str], tenant: str, receive: Receive) -> list[Job]:
        """The jobs, in order, when all have succeeded. Raises what became of the first that did not, or ClientGone."""
        with self._watching(job_ids):
            ends = asyncio.create_task(self._all_ends(job_ids, tenant))
            gone = asyncio.create_task(until_hang_up(receive))
            try:
                await asyncio.wait({ends, gone}, return_when=asyncio.FIRST_COMPLETED)
                error = ends.exception() if ends.done() else ClientGone()
            finally:
                await end(ends, gone)
        if error is None:
            return ends.result()
        await self.abandon(job_ids)
        raise error

    async def events(self, job_ids: Sequence[str]) -> AsyncGenerator[tuple[int, list[Event]], None]:
        """Events of the jobs as they come: (which job, its next events in order); no events mean a silence.

        Ends when all have succeeded. Raises what became of the first that did not, and GatewayClosing.
        """
        try:
            with self._watching(job_ids):
                async with aclosing(self._merged(job_ids)) as merged:
                    async for index, events in merged:
                        yield index, events
                        if events and (failure := _failure_of_event(events[-1], job_ids[index])):
                            raise failure
        except (JobFailed, JobCancelled, JobExpired):
            await self.abandon(job_ids)
            raise

    async def abandon(self, job_ids: Sequence[str]) -> None:
        """Cancels the jobs that nobody waits for any more. Not while shutting down: that sends clients away."""
        if self.hub.is_closing_streams:
            return
        for job_id in job_ids:
            if job_id not in self._watchers:
                await self.book.store.cancel(job_id)

    async def keep_watch(self) -> None:
        """Tells the store again and again who is waited for, until cancelled."""
        pause = self.watch_seconds / WATCHES_IN_TIME
        while True:
            await asyncio.sleep(pause)
            is_told = await self._tell(self._watchers, seconds=self.watch_seconds)
            pause = self.watch_seconds / WATCHES_IN_TIME if is_told else min(RETRY_SECONDS, pause)

    async def let_go(self) -> None:
        """At the end of this gateway: what its clients waited for needs nobody to wait any more."""
        await self._tell({*self._watchers, *self._left}, seconds=None)

    async def _tell(self, job_ids: Iterable[str], *, seconds: float | None) -> bool:
        """False where the store did not hear it."""
        by_lane = defaultdict[int, list[str]](list)
        for job_id in job_ids:
            by_lane[keys.lane_of(job_id)].append(job_id)
        try:
            for lane, its_jobs in by_lane.items():
                await self.book.store.watch(lane, its_jobs, seconds=seconds)
        except StoreUnavailable as error:
            log.warning("the store was not told which jobs are waited for: %s", error)
            return False
        return True

    @contextmanager
    def _watching(self, job_ids: Sequence[str]) -> Iterator[None]:
        self._watchers.update(job_ids)
        try:
            yield
        finally:
            self._watchers.subtract(job_ids)
            for job_id in set(job_ids):
                if not self._watchers[job_id]:
                    del self._watchers[job_id]
            if self.hub.is_closing_streams:
                self._left.update(job_ids)

    async def _all_ends(self, job_ids: Sequence[str], tenant: str) -> list[Job]:
        return await asyncio.gather(*(self._end(job_id, tenant) for job_id in job_ids))

    async def _end(self, job_id: str, tenant: str) -> Job:
        job = await self.book.wait(await self.book.get(job_id, tenant), timeout=LONGEST_SECONDS)
        if job.status not in TERMINAL:
            raise _closing(job_id)
        if failure := failure_of(job.status, job.outcome.error if job.outcome else None, job_id):
            raise failure
        return job

    async def _merged(self, job_ids: Sequence[str]) -> AsyncGenerator[tuple[int, list[Event]], None]:
        with ExitStack() as stack:
            readers = [stack.enter_context(self.hub.follow(job_id, ends_early=True)) for job_id in job_ids]
            pending = {
                asyncio.create_task(reader.next(timeout=self.keepalive_seconds)): index
                for index, reader in enumerate(readers)
            }
            try:
                while pending:
                    done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        index = pending.pop(task)
                        try:
                            events = task.result()
                        except GatewayClosing:
                            raise _closing(job_ids[index]) from None
                        yield index, events
                        if not (events and events[-1].is_last):
                            again = asyncio.create_task(readers[index].next(timeout=self.keepalive_seconds))
                            pending[again] = index
            finally:
                await end(*pending)


def failure_of(status: Status, error: JobError | None, job_id: str) -> MillstreamError | None:
    """What a client that waited for the job is told; None where it succeeded."""
    match status:
        case Status.FAILED:
            return JobFailed(error or JobError(code="internal_error", message=f"{job_id} failed for an unknown reason"))
        case Status.CANCELLED:
            return JobCancelled(f"{job_id} was cancelled before it ended; see GET /v1/jobs/{job_id}")
        case Status.EXPIRED:
            return JobExpired(f"{job_id} was not finished in time; allow more time, or submit it again")
    return None


def _failure_of_event(event: Event, job_id: str) -> MillstreamError | None:
    return failure_of(Status(event.type.removeprefix("job.")), event.body.error, job_id) if event.is_last else None


def _closing(job_id: str) -> GatewayClosing:
    return GatewayClosing(f"this gateway is shutting down; the job goes on: see GET /v1/jobs/{job_id}")
