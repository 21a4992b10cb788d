"""What the OpenAI routes share: their jobs are admitted together, and their clients wait for them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from litestar import Response

from api_gateway import fields
from api_gateway.admission import Ask
from api_gateway.errors import detail_of
from api_gateway.intake import Idempotency
from api_gateway.routes.context import AnyRequest, gateway_of, tenant_of
from api_gateway.schemas.errors import ErrorBody
from api_gateway.sse import DONE, EventStream, frame
from api_gateway.telemetry import traceparent_of
from infra.contracts import Job
from infra.errors import MillstreamError


async def admit(request: AnyRequest, asks: list[Ask], route: str) -> list[Job]:
    """The jobs of the asks, in order. All are checked before any is queued."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    key = fields.idempotency_key(request.headers.get("idempotency-key"))
    drafts = [await gateway.admission.draft(ask, tenant) for ask in asks]
    admitted = await gateway.intake.admit(
        drafts,
        tenant,
        idempotency=Idempotency.of(key, route, await request.body()) if key else None,
        parent=traceparent_of(request),
        watch_seconds=gateway.settings.watch_seconds,
    )
    for ask, one in zip(asks, admitted, strict=True):
        gateway.metrics.admitted(ask.model, ask.tier).inc(one.is_new)
    return [one.job for one in admitted]


def answer_stream(request: AnyRequest, job_ids: list[str], batches: AsyncGenerator[list[bytes], None]) -> Response[Any]:
    """The frames of the batches, then `[DONE]`; or an error frame where they break."""
    gateway = gateway_of(request)

    async def hung_up() -> None:
        await gateway.foreground.abandon(job_ids)

    return EventStream(
        _until_done(batches), on_hang_up=hung_up, gauge=gateway.metrics.event_streams_open.track_inprogress()
    )


async def _until_done(batches: AsyncGenerator[list[bytes], None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(batches):
            async for batch in batches:
                if batch:
                    yield b"".join(batch)
    except MillstreamError as error:
        yield frame(ErrorBody(error=detail_of(error)))
    else:
        yield DONE
