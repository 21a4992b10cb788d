"""Turns drafts into jobs: idempotency key first, large payloads to the blob store, then one idempotent submit."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass

import msgspec

from api_gateway import eta
from api_gateway.admission import Draft
from api_gateway.cards import Cards
from api_gateway.errors import Throttled
from api_gateway.outlook import Outlook
from infra import keys
from infra.blobs import Blobs
from infra.contracts import Job, JobSpec, NewJob, pack
from infra.errors import MillstreamError, QueueFull, StoreUnavailable, UnknownJob
from infra.span_names import request_attributes, request_name
from infra.store import JobStore, Place
from infra.telemetry import Telemetry

MAX_INLINE_BYTES = 256 * 1024  # a larger spec goes to the blob store


@dataclass(frozen=True, slots=True)
class Idempotency:
    """A caller's key, and what it may be used for again."""

    key: str
    route: str
    fingerprint: str

    @classmethod
    def of(cls, key: str, route: str, body: bytes) -> Idempotency:
        return cls(key, route, hashlib.sha256(body).hexdigest())


class Admitted(msgspec.Struct, frozen=True):
    """One job of a request, as it stood then; `place` is None where it was not queued any more, or is not known."""

    job: Job
    place: Place | None
    is_new: bool  # False: a key named a job that was there


@dataclass(frozen=True, slots=True)
class Intake:
    store: JobStore
    blobs: Blobs
    cards: Cards
    outlook: Outlook
    telemetry: Telemetry
    max_waiting: int

    async def admit(
        self,
        drafts: list[Draft],
        tenant: str,
        *,
        idempotency: Idempotency | None = None,
        parent: str | None = None,
        watch_seconds: float | None = None,
    ) -> list[Admitted]:
        """Makes one job of each draft, in order; all of them go by the one key.

        With `watch_seconds`, they are cancelled unless somebody watches them again and again.

        Raises IdempotencyMismatch, Throttled, or StoreUnavailable: then calling again with the same key completes it.
        """
        ids = [keys.new_job_id(await self.cards.lane(draft.spec.model)) for draft in drafts]
        claimed_before = False
        if idempotency is not None:
            first = await self.claim(idempotency, tenant, ids[0])
            claimed_before = first != ids[0]
            ids = [first, *(_sibling(first, index) for index in range(1, len(ids)))]
        admitted = list[Admitted]()
        try:
            for draft, job_id in zip(drafts, ids, strict=True):
                admitted.append(await self._admit(draft, job_id, tenant, parent, claimed_before, watch_seconds))
        except MillstreamError:
            if idempotency is None:  # else a repeated call completes what was begun
                await self._take_back(admitted)
            raise
        return admitted

    async def _take_back(self, admitted: list[Admitted]) -> None:
        """Cancels the jobs of a request that could not be admitted as a whole; a store that is gone keeps them."""
        with contextlib.suppress(StoreUnavailable):
            for one in admitted:
                await self.store.cancel(one.job.id)

    async def claim(self, idempotency: Idempotency, tenant: str, job_id: str) -> str:
        """The id to use under a key: `job_id`, or the one that the key stands for already."""
        digest = hashlib.sha256(idempotency.key.encode()).hexdigest()
        return await self.store.claim_key(tenant, idempotency.route, digest, idempotency.fingerprint, job_id)

    async def _admit(
        self,
        draft: Draft,
        job_id: str,
        tenant: str,
        parent: str | None,
        claimed_before: bool,
        watch_seconds: float | None,
    ) -> Admitted:
        if claimed_before and (known := await self.store.look(job_id)) is not None:
            return Admitted(*known, is_new=False)
        attributes = None  # costly, and read by nobody where telemetry is off
        if self.telemetry.is_on:
            attributes = {**request_attributes(draft.spec), "messaging.message.id": job_id}
        with self.telemetry.span(
            request_name(draft.spec), kind="producer", parent=parent, attributes=attributes
        ) as span:
            found = await self._write(draft, job_id, tenant, span.traceparent, watch_seconds)
        return Admitted(*found, is_new=True)

    async def _write(
        self, draft: Draft, job_id: str, tenant: str, traceparent: str | None, watch_seconds: float | None
    ) -> tuple[Job, Place | None]:
        ask = draft.ask
        job = NewJob(
            id=job_id,
            spec=await self._inline_or_blob(draft.spec, job_id),
            tier=ask.tier,
            priority=ask.priority,
            tenant=tenant,
            cost_tokens=draft.cost_tokens,
            queue_ttl_ms=ask.queue_ttl_ms,
            deadline_ms=ask.deadline_ms,
            attempt_timeout_ms=ask.attempt_timeout_ms,
            watch_ms=None if watch_seconds is None else round(watch_seconds * 1000),
            traceparent=traceparent,
        )
        try:
            found = await self.store.submit(job, max_waiting=self.max_waiting)
        except QueueFull:
            alias = job.spec.model
            wait_seconds = eta.retry_after_seconds(await self.outlook.facts(alias))
            raise Throttled(
                f"model {alias}: {self.max_waiting} jobs are waiting, as many as the queue takes; "
                f"try again in {wait_seconds:.0f} s",
                retry_after_seconds=wait_seconds,
            ) from None
        if found is not None:
            return found
        if (known := await self.store.look(job_id)) is None:  # written by a call whose answer was lost
            raise UnknownJob(f"{job_id} was deleted as soon as it was admitted", param="id")
        return known

    async def _inline_or_blob(self, spec: JobSpec, job_id: str) -> JobSpec:
        data = pack(spec)
        if len(data) <= MAX_INLINE_BYTES:
            return spec
        key = spec_blob(job_id)
        await asyncio.to_thread(self.blobs.put, key, data)
        return msgspec.structs.replace(spec, messages=None, prompt=None, prompt_token_ids=None, blob=key)


def spec_blob(job_id: str) -> str:
    """Key of the blob that holds a spec too large for the store."""
    return f"specs/{job_id}"


def _sibling(job_id: str, index: int) -> str:
    """The id of another job of the same request: the same each time."""
    lane = keys.lane_of(job_id)
    unique = job_id.rsplit("-", 1)[1]
    return keys.new_job_id(lane, f"{unique[:48]}x{index:04x}")
