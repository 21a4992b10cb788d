"""What every route needs of a request."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.openapi.datastructures import ResponseSpec

from api_gateway.gateway import Gateway
from api_gateway.schemas.errors import ErrorBody

AnyRequest = Request[Any, Any, Any]

# What the OpenAPI document says of refusals; every one of any status has this shape.
REFUSALS = {400: ResponseSpec(ErrorBody, generate_examples=False, description="Malformed, or out of range")}


def gateway_of(request: AnyRequest) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def tenant_of(request: AnyRequest) -> str:
    """The caller's tenant, as the guard found it."""
    tenant: str = request.scope["state"]["tenant"]
    return tenant
