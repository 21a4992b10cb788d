"""`/v1/jobs`: submit, look, wait, list, cancel, forget."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from litestar import Response, delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from api_gateway import fields
from api_gateway.admission import Ask
from api_gateway.answers import JsonAnswer
from api_gateway.bodies import decode
from api_gateway.direct import direct
from api_gateway.errors import detail_of
from api_gateway.headers import header_of
from api_gateway.intake import Idempotency, spec_blob
from api_gateway.job_book import MAX_WAIT_SECONDS
from api_gateway.messages import plain_messages
from api_gateway.routes.context import REFUSALS, AnyRequest, gateway_of, tenant_of
from api_gateway.schemas.jobs import (
    BulkAnswer,
    BulkItem,
    BulkRequest,
    Deleted,
    JobList,
    JobRequest,
    JobView,
    TimelineView,
)
from api_gateway.telemetry import traceparent_of
from api_gateway.views import job_view, timeline_view
from infra.contracts import Job, Kind, Message
from infra.errors import BadRequest, MillstreamError
from infra.states import TERMINAL, Status

MAX_BULK_JOBS = 1000
BULK_AT_ONCE = 16
MAX_LIST_PAGES = 20  # of the store, that one page of a filtered list may look at

Wait = Annotated[float | None, QueryParameter(description="seconds to wait for the job's end, 600 at most")]


@post("/v1/jobs", status_code=202, responses=REFUSALS, middleware=[direct])
async def create_job(data: JSONBody[JobRequest], request: AnyRequest) -> Response[JobView]:
    """Submits a job. With `Prefer: wait=n`, waits so many seconds for its end: then 200, else 202."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    wait_seconds = fields.prefer_wait_seconds(header_of(request.scope, b"prefer"))
    key = fields.idempotency_key(header_of(request.scope, b"idempotency-key"))
    draft = await gateway.admission.draft(job_ask(data), tenant)
    [admitted] = await gateway.intake.admit(
        [draft],
        tenant,
        idempotency=Idempotency.of(key, "POST /v1/jobs", await request.body()) if key else None,
        parent=traceparent_of(request),
    )
    gateway.metrics.admitted(data.model, data.tier).inc(admitted.is_new)
    job = admitted.job
    headers = {"location": f"/v1/jobs/{job.id}"}
    if not admitted.is_new:
        headers["idempotent-replayed"] = "true"
    if wait_seconds is None:
        return JsonAnswer(await gateway.book.show(job, admitted.place), status_code=202, headers=headers)
    headers["preference-applied"] = f"wait={wait_seconds:.0f}"
    job = await gateway.book.wait(job, timeout=min(wait_seconds, MAX_WAIT_SECONDS))
    status = 200 if job.status in TERMINAL else 202
    return JsonAnswer(await gateway.book.view(job), status_code=status, headers=headers)


@post("/v1/jobs/bulk", status_code=200, responses=REFUSALS)
async def create_jobs(data: JSONBody[BulkRequest], request: AnyRequest) -> BulkAnswer:
    """Submits up to 1,000 jobs. Each is admitted or refused on its own; nothing is undone."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    if not 1 <= len(data.jobs) <= MAX_BULK_JOBS:
        raise BadRequest(f"jobs: {len(data.jobs)} jobs; send 1 to {MAX_BULK_JOBS}", param="jobs")
    key = fields.idempotency_key(request.headers.get("idempotency-key"))
    slots = asyncio.Semaphore(BULK_AT_ONCE)

    async def admit(raw: msgspec.Raw, index: int) -> BulkItem:
        """Its own part of the key: a repeated call finds the jobs that it made."""
        async with slots:
            try:
                job = decode(raw, _JOB_REQUEST)
                draft = await gateway.admission.draft(job_ask(job), tenant)
                [admitted] = await gateway.intake.admit(
                    [draft],
                    tenant,
                    idempotency=Idempotency.of(f"{key} {index}", "POST /v1/jobs/bulk", bytes(raw)) if key else None,
                    parent=traceparent_of(request),
                )
                gateway.metrics.admitted(job.model, job.tier).inc(admitted.is_new)
                return BulkItem(status=202, job=job_view(admitted.job))
            except MillstreamError as error:
                return BulkItem(status=error.status, error=detail_of(error))

    items = await asyncio.gather(*(admit(raw, index) for index, raw in enumerate(data.jobs)))
    accepted = sum(item.job is not None for item in items)
    return BulkAnswer(data=list(items), accepted=accepted, refused=len(items) - accepted)


@get("/v1/jobs/{job_id:str}", responses=REFUSALS)
async def get_job(job_id: FromPath[str], request: AnyRequest, wait: Wait = None) -> JobView:
    """The job as it stands; with `wait`, when it has ended or the time is up."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    if wait is None:
        return await gateway.book.look(job_id, tenant)
    if not 0 <= wait <= MAX_WAIT_SECONDS:
        raise BadRequest(f"wait: {wait} is not between 0 and {MAX_WAIT_SECONDS:.0f} seconds", param="wait")
    job = await gateway.book.wait(await gateway.book.get(job_id, tenant), timeout=wait)
    return await gateway.book.view(job)


@get("/v1/jobs", responses=REFUSALS)
async def list_jobs(
    request: AnyRequest,
    status: FromQuery[Status | None] = None,
    model: FromQuery[str | None] = None,
    after: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=100)] = 20,
) -> JobList:
    """The caller's jobs, newest first, without results. Pass `last_id` as `after` for the next page.

    A page of a filtered list may be short, or empty, and still have more behind it.
    """
    gateway, tenant = gateway_of(request), tenant_of(request)
    found: list[Job] = []
    last: str | None = None
    for _ in range(MAX_LIST_PAGES):
        page = await gateway.store.list_jobs(tenant, limit=limit + 1, after=last or after)
        for job in page[:limit]:
            last = job.id
            if status in (None, job.status) and model in (None, job.spec.model):
                found.append(job)
            if len(found) == limit:
                break
        if len(found) == limit or len(page) <= limit:
            break
    has_more = bool(page) and last != page[-1].id
    return JobList(data=[job_view(job) for job in found], last_id=last, has_more=has_more)


@post("/v1/jobs/{job_id:str}/cancel", status_code=200, responses=REFUSALS)
async def cancel_job(job_id: FromPath[str], request: AnyRequest) -> JobView:
    """Ends a job at once, also a running one. Cancelling what has ended changes nothing."""
    gateway = gateway_of(request)
    job = await gateway.book.get(job_id, tenant_of(request))
    return await gateway.book.view(await gateway.store.cancel(job.id) or job)


@delete("/v1/jobs/{job_id:str}", status_code=200, responses=REFUSALS)
async def delete_job(job_id: FromPath[str], request: AnyRequest) -> Deleted:
    """Forgets a finished job and its data."""
    gateway = gateway_of(request)
    job = await gateway.book.get(job_id, tenant_of(request))
    await gateway.store.delete(job.id)
    result = job.outcome.result if job.outcome else None
    for key in {job.spec.blob and spec_blob(job.id), result and result.blob}:
        if key:
            await asyncio.to_thread(gateway.blobs.delete, key)
    return Deleted(id=job.id, object="job")


@get("/v1/jobs/{job_id:str}/timeline", responses=REFUSALS)
async def get_timeline(job_id: FromPath[str], request: AnyRequest) -> TimelineView:
    """Why the job took as long as it did."""
    gateway = gateway_of(request)
    job = await gateway.book.get(job_id, tenant_of(request))
    return timeline_view(job, await gateway.book.log(job), now_ms=time.time_ns() // 1_000_000)


_JOB_REQUEST = msgspec.json.Decoder(JobRequest)


def job_ask(body: JobRequest) -> Ask:
    """The request in admission's words. Raises BadRequest naming the field."""
    for name, value in (("priority", body.params.priority or None), ("deadline", body.params.deadline)):
        if value is not None:
            raise BadRequest(f"params.{name}: set the job's own field {name} instead", param=f"params.{name}")
    return Ask(
        model=body.model,
        params=body.params,
        tier=body.tier,
        priority=fields.priority(body.priority),
        deadline_ms=fields.deadline_ms(body.deadline, now_ms=time.time_ns() // 1_000_000),
        queue_ttl_ms=fields.seconds_ms(body.queue_ttl, "queue_ttl"),
        attempt_timeout_ms=fields.seconds_ms(body.attempt_timeout, "attempt_timeout"),
        webhook=fields.webhook(body.webhook),
        metadata=fields.metadata(body.metadata),
        param_prefix="params.",
        **_input_of(body),
    )


def _input_of(body: JobRequest) -> dict[str, Any]:
    if isinstance(body.input, str):
        found: dict[str, Any] = {"prompt": body.input}
    elif not body.input:
        raise BadRequest("input: the list is empty; send token ids or messages", param="input")
    elif all(isinstance(item, int) for item in body.input):
        found = {"prompt_token_ids": body.input}
    else:
        messages = [item for item in body.input if not isinstance(item, int)]
        if len(messages) < len(body.input):
            raise BadRequest("input: the list mixes token ids and messages; send one kind", param="input")
        found = {"messages": _messages(messages)}
    kind = Kind.CHAT if "messages" in found else Kind.GENERATE
    if body.kind not in (None, kind):
        raise BadRequest(f"kind: {body.kind} does not go with this input; leave it out, or say {kind}", param="kind")
    return found


def _messages(messages: list[Any]) -> list[Message]:
    return plain_messages(messages, "input")
