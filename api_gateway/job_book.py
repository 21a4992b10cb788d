"""Reads jobs for their tenants: the record, its place in the queue, its result from wherever it lies."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec

from api_gateway import eta
from api_gateway.errors import GatewayClosing
from api_gateway.event_hub import EventHub
from api_gateway.outlook import Outlook, work_of
from api_gateway.schemas.jobs import JobView, QueueView
from api_gateway.views import job_view
from infra.blobs import Blobs
from infra.contracts import Event, Job, Result
from infra.errors import EventsGone, UnknownJob
from infra.states import TERMINAL, Status
from infra.store import JobStore, Place

MAX_WAIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class JobBook:
    store: JobStore
    blobs: Blobs
    outlook: Outlook
    hub: EventHub

    async def get(self, job_id: str, tenant: str) -> Job:
        """The tenant's job. Raises UnknownJob for another tenant's as for one that never was."""
        job = await self.store.get(job_id)
        if job is None or job.tenant != tenant:
            raise _unknown(job_id)
        return job

    async def look(self, job_id: str, tenant: str) -> JobView:
        """The job as its tenant sees it, its place in the queue included. Raises UnknownJob."""
        found = await self.store.look(job_id)
        if found is None or found[0].tenant != tenant:
            raise _unknown(job_id)
        return await self.show(*found)

    async def view(self, job: Job) -> JobView:
        """The same of a record that is there already."""
        if job.status is Status.QUEUED:
            return await self.look(job.id, job.tenant)
        return await self.show(job, None)

    async def show(self, job: Job, place: Place | None) -> JobView:
        """The same of a record and a place that are there already."""
        return job_view(job, queue=await self._queue(job, place), result=await self.result(job))

    async def result(self, job: Job) -> Result | None:
        """The job's result, fetched from the blob store where it is too large for the record."""
        result = job.outcome.result if job.outcome else None
        if result is None or result.blob is None:
            return result
        data = await asyncio.to_thread(self.blobs.get, result.blob)
        return msgspec.msgpack.decode(data, type=Result)

    async def wait(self, job: Job, *, timeout: float) -> Job:
        """The job when it has ended, or as it stands when the time is up or this gateway closes."""
        if job.status in TERMINAL or timeout <= 0:
            return job
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        with self.hub.follow(job.id, after=job.num_events - 1) as reader:
            while (left := end - loop.time()) > 0:
                try:
                    events = await reader.next(timeout=left)
                except (EventsGone, GatewayClosing):
                    break
                if events and events[-1].is_last:
                    break
        return await self.get(job.id, job.tenant)

    async def log(self, job: Job) -> list[Event] | None:
        """The whole event log, or None where it has expired."""
        events: list[Event] = []
        with contextlib.suppress(EventsGone):
            while page := await self.store.events(job.id, after=len(events) - 1, limit=self.hub.page):
                events += page
            return events
        return None

    async def _queue(self, job: Job, place: Place | None) -> QueueView | None:
        if place is None:
            return None
        facts = await self.outlook.facts(job.spec.model)
        wait_seconds = eta.eta_seconds(facts, job.lane, job.tier, place, work_of(job))
        in_pool = eta.place_in_pool(facts, job.lane, job.tier, place)
        return QueueView(
            position=in_pool.position,
            ahead_tokens=round(facts.sizes.expected(in_pool.ahead).tokens),
            eta_seconds=None if wait_seconds is None else round(wait_seconds, 3),
        )


def _unknown(job_id: str) -> UnknownJob:
    return UnknownJob(f"no job {job_id[:80]}: it never was, or its record has expired", param="id")
