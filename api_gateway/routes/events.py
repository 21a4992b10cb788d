"""`/v1/jobs/{id}/events`: a job's event log as server-sent events, before, during and after the run."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

from litestar import Response, get
from litestar.params import FromPath, QueryParameter

from api_gateway.errors import GatewayClosing, detail_of
from api_gateway.routes.context import REFUSALS, AnyRequest, gateway_of, tenant_of
from api_gateway.schemas.errors import ErrorBody
from api_gateway.sse import KEEPALIVE, EventStream, frame
from api_gateway.views import event_view
from infra.contracts import Event, Job
from infra.errors import BadRequest, EventsGone, MillstreamError
from infra.states import TERMINAL

Start = Annotated[int, QueryParameter(ge=-1, le=10**15, description="number of the last event you have")]


@get("/v1/jobs/{job_id:str}/events", media_type="text/event-stream", responses=REFUSALS)
async def job_events(job_id: FromPath[str], request: AnyRequest, starting_after: Start = -1) -> Response[Any]:
    """Every event of the job once, in order; `id:` is its sequence number.

    A client that comes back with `Last-Event-ID` (or `starting_after`) gets exactly the rest; 204 when there is none.
    """
    gateway = gateway_of(request)
    job = await gateway.book.get(job_id, tenant_of(request))
    after = _last_event_id(request.headers.get("last-event-id"), starting_after)
    if job.status in TERMINAL and after >= job.num_events - 1:
        return Response(None, status_code=204)  # tells a browser to stop coming back
    first = await _first_events(request, job, after)
    return EventStream(_frames(request, job, after, first), gauge=gateway.metrics.event_streams_open.track_inprogress())


def _last_event_id(header: str | None, starting_after: int) -> int:
    """A browser that reconnects repeats the URL as it was, so its header knows better."""
    if not header:
        return starting_after
    if not header.isascii() or not header.isdigit() or len(header) > 15:
        raise BadRequest(f"Last-Event-ID: {header[:80]!r} is not a sequence number", param="Last-Event-ID")
    return int(header)


async def _first_events(request: AnyRequest, job: Job, after: int) -> list[Event]:
    """What is there already, read before the answer starts, so that an expired log is a 410 and not a stream."""
    gateway = gateway_of(request)
    try:
        return await gateway.store.events(job.id, after=after, limit=gateway.settings.event_page)
    except EventsGone:
        raise EventsGone(f"the event log of {job.id} has expired; its result is at GET /v1/jobs/{job.id}") from None


async def _frames(request: AnyRequest, job: Job, after: int, first: list[Event]) -> AsyncGenerator[bytes, None]:
    gateway = gateway_of(request)
    if first:
        yield b"".join(map(_frame, first))
    if first and first[-1].is_last:
        return
    position = first[-1].sequence_number if first else after
    try:
        with gateway.hub.follow(job.id, after=position, ends_early=True) as reader:
            while True:
                events = await reader.next(timeout=gateway.settings.keepalive_seconds)
                yield b"".join(map(_frame, events)) or KEEPALIVE
                if events and events[-1].is_last:
                    return
    except GatewayClosing:
        return  # the client comes back, to another gateway, and goes on from its last event
    except MillstreamError as error:
        yield frame(ErrorBody(error=detail_of(error)), event="error")


def _frame(event: Event) -> bytes:
    return frame(event_view(event), event=event.type, id=event.sequence_number)
