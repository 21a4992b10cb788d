"""`/openapi.json`: every route and every field, from the structs that the routes use."""

from __future__ import annotations

from typing import Any

from litestar import get
from litestar.response import Redirect

from api_gateway.routes.context import AnyRequest


@get("/openapi.json", include_in_schema=False)
async def openapi_document(request: AnyRequest) -> dict[str, Any]:
    """OpenAPI 3.1."""
    return request.app.openapi_schema.to_schema()


@get("/", include_in_schema=False)
async def home() -> Redirect:
    """People who open the address in a browser find the documentation."""
    return Redirect("/docs")
