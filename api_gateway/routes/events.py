"""`/v1/jobs/{id}/events`: a job's event log as server-sent events, before, during and after the run."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
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
    frames = _frames(request, job, after)
    first = await anext(frames, b"")  # before the answer starts, so that an expired log is a 410 and not a stream
    return EventStream(_all(first, frames), gauge=gateway.metrics.event_streams_open.track_inprogress())


async def _all(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


def _last_event_id(header: str | None, starting_after: int) -> int:
    """A browser that reconnects repeats the URL as it was, so its header knows better."""
    if not header:
        return starting_after
    if not header.isascii() or not header.isdigit() or len(header) > 15:
        raise BadRequest(f"Last-Event-ID: {header[:80]!r} is not a sequence number", param="Last-Event-ID")
    return int(header)


async def _frames(request: AnyRequest, job: Job, after: int) -> AsyncGenerator[bytes, None]:
    """First what is there already, perhaps nothing. Raises EventsGone only before that."""
    gateway, is_first = gateway_of(request), True
    try:
        with gateway.hub.follow(job.id, after=after, ends_early=True) as reader:
            events = await reader.next(timeout=0.0)
            yield b"".join(map(_frame, events))
            is_first = False
            while not (events and events[-1].is_last):
                events = await reader.next(timeout=gateway.settings.keepalive_seconds)
                yield b"".join(map(_frame, events)) or KEEPALIVE
    except GatewayClosing:
        return  # the client comes back, to another gateway, and goes on from its last event
    except MillstreamError as error:
        if is_first and isinstance(error, EventsGone):
            raise EventsGone(f"the event log of {job.id} has expired; its result is at GET /v1/jobs/{job.id}") from None
        yield frame(ErrorBody(error=detail_of(error)), event="error")


def _frame(event: Event) -> bytes:
    return frame(event_view(event), event=event.type, id=event.sequence_number)
