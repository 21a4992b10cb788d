"""Whether this process lives, whether it can serve, and what Prometheus wants to know."""

from __future__ import annotations

from litestar import Response, get
from prometheus_client import CONTENT_TYPE_LATEST

from api_gateway.routes.context import AnyRequest, gateway_of
from infra.errors import MillstreamError

EXPOSITION = CONTENT_TYPE_LATEST.removesuffix("; charset=utf-8")  # the framework adds it to every text


@get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers. It says nothing of the store: restarting a gateway mends no store."""
    return {"status": "ok"}


@get("/readyz")
async def readyz(request: AnyRequest) -> Response[dict[str, str]]:
    """Requests can be taken: the store answers, a model is known, and this gateway is not shutting down."""
    gateway = gateway_of(request)
    try:
        await gateway.store.ping()
        problem = None if await gateway.cards.all() else "no model yet: no worker has ever registered one"
    except MillstreamError as error:
        problem = error.message
    if gateway.is_closing:
        problem = "shutting down"
    if problem:
        return Response({"status": "unavailable", "reason": problem}, status_code=503)
    return Response({"status": "ok"})


@get("/metrics", media_type=EXPOSITION, include_in_schema=False)
async def metrics(request: AnyRequest) -> bytes:
    """Prometheus text."""
    gateway = gateway_of(request)
    return await gateway.metrics.text(gateway.outlook)
