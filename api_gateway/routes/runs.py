"""`/v1/runs`: bulk workflows made of many jobs."""

from __future__ import annotations

import asyncio
import time

from litestar import Response, get, post
from litestar.params import FromPath, JSONBody

from api_gateway import fields
from api_gateway.gateway import Gateway
from api_gateway.intake import Idempotency
from api_gateway.routes.context import REFUSALS, AnyRequest, gateway_of, tenant_of
from api_gateway.run_views import report_view, run_out
from api_gateway.schemas.runs import DocumentIn, ReportView, RunOut, SummarizeRequest
from api_gateway.telemetry import traceparent_of
from infra.errors import BadRequest, MillstreamError
from infra.runs import DocumentSource, NewRun, RunStore, RunView, SummaryParams, document_blob, new_run_id

ROUTE = "POST /v1/runs/summarize"
URI_SCHEMES = ("file://", "s3://")


class UnknownRun(MillstreamError):
    """No run of that id: it never was, or its record has expired."""

    status = 404
    code = "run_not_found"


class NoRuns(MillstreamError):
    """This gateway was started without a store of runs."""

    status = 501
    code = "runs_unavailable"


class NoOutput(MillstreamError):
    """The run has no output: it has not ended, or it was cancelled."""

    status = 404
    code = "output_not_found"


@post("/v1/runs/summarize", status_code=202, responses=REFUSALS)
async def create_summarize_run(data: JSONBody[SummarizeRequest], request: AnyRequest) -> Response[RunOut]:
    """Summarizes documents. A bad document gets an error of its own and hurts no other."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    key = fields.idempotency_key(request.headers.get("idempotency-key"))
    run, texts = await _new_run(data, request)
    run.check()
    if key:
        idempotency = Idempotency.of(key, ROUTE, await request.body())
        run.id = await gateway.intake.claim(idempotency, tenant, run.id)
    runs = _runs(gateway)
    if key is None or await runs.get(run.id) is None:
        for number, text in texts.items():
            blob = run.documents[number].blob = document_blob(run.id, number)
            await asyncio.to_thread(gateway.blobs.put, blob, text.encode())
        await runs.create(run)
    view = await _owned(request, run.id)
    return Response(run_out(view), status_code=202, headers={"location": f"/v1/runs/{run.id}"})


@get("/v1/runs/{run_id:str}", responses=REFUSALS)
async def get_run(run_id: FromPath[str], request: AnyRequest) -> RunOut:
    """The run as it stands, document by document."""
    return run_out(await _owned(request, run_id))


@post("/v1/runs/{run_id:str}/cancel", status_code=200, responses=REFUSALS)
async def cancel_run(run_id: FromPath[str], request: AnyRequest) -> RunOut:
    """Ends a run and its jobs. Cancelling what has ended changes nothing."""
    view = await _owned(request, run_id)
    return run_out(await _runs(gateway_of(request)).cancel(run_id) or view)


@get("/v1/runs/{run_id:str}/report", responses=REFUSALS)
async def get_report(run_id: FromPath[str], request: AnyRequest) -> ReportView:
    """What the run did so far: every byte and every failure accounted for."""
    return report_view(await _owned(request, run_id))


@get("/v1/runs/{run_id:str}/output", media_type="application/jsonl", responses=REFUSALS)
async def get_output(run_id: FromPath[str], request: AnyRequest) -> Response[bytes]:
    """The summaries of a finished run: JSONL, one line a document."""
    view = await _owned(request, run_id)
    if view.header.output is None:
        raise NoOutput(f"run {run_id} has no output: it is {view.status}")
    data = await asyncio.to_thread(gateway_of(request).blobs.get, view.header.output)
    return Response(data, media_type="application/jsonl")


async def _new_run(body: SummarizeRequest, request: AnyRequest) -> tuple[NewRun, dict[int, str]]:
    """The run, and the texts of its documents by number. Raises BadRequest naming the field."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    await gateway.cards.get(body.model)
    texts = {number: one.text for number, one in enumerate(body.documents) if one.text is not None}
    run_id = new_run_id()
    run = NewRun(
        id=run_id,
        params=SummaryParams(**{name: getattr(body, name) for name in SummaryParams.__struct_fields__}),
        documents=[_source(run_id, number, document) for number, document in enumerate(body.documents)],
        tier=body.tier,
        priority=fields.priority(body.priority),
        tenant=tenant,
        deadline_ms=fields.deadline_ms(body.deadline, now_ms=time.time_ns() // 1_000_000),
        salt=gateway.keyring.cache_domain(tenant),
        webhook=fields.webhook(body.webhook, fields.RUN_EVENTS),
        metadata=fields.metadata(body.metadata),
        traceparent=traceparent_of(request),
    )
    return run, texts


def _source(run_id: str, number: int, document: DocumentIn) -> DocumentSource:
    if (document.text is None) == (document.uri is None):
        raise BadRequest(
            f"documents[{number}]: give it either a text or a uri, and not both", param=f"documents[{number}]"
        )
    if document.uri is not None and not document.uri.startswith(URI_SCHEMES):
        raise BadRequest(
            f"documents[{number}].uri: {document.uri[:80]!r} does not start with {' or '.join(URI_SCHEMES)}",
            param=f"documents[{number}].uri",
        )
    own_id = document.id or str(number)
    return DocumentSource(
        id=own_id,
        name=document.name or own_id,
        blob=None if document.text is None else document_blob(run_id, number),
        uri=document.uri,
    )


def _runs(gateway: Gateway) -> RunStore:
    if gateway.runs is None:
        raise NoRuns
    return gateway.runs


async def _owned(request: AnyRequest, run_id: str) -> RunView:
    """The tenant's run. Raises UnknownRun for another tenant's as for one that never was."""
    view = await _runs(gateway_of(request)).get(run_id)
    if view is None or view.header.run.tenant != tenant_of(request):
        raise UnknownRun(f"no run {run_id[:80]}: it never was, or its record has expired", param="id")
    return view
