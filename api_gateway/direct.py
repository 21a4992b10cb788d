"""Calls a handler without the framework's generality: its models of arguments, dependencies, hooks and answers.

That takes a tenth of what a submit costs beside the store. Such a handler is declared like any other, so that its
route, its callers and its OpenAPI are the framework's.
"""

from __future__ import annotations

from typing import Any

from litestar.types import ASGIApp, Receive, Scope, Send

from api_gateway.bodies import decode, decoder_of
from api_gateway.errors import answer_to
from api_gateway.headers import LeanRequest
from infra.errors import BadRequest


def direct(app: ASGIApp) -> ASGIApp:
    """Middleware of a handler that takes `data`, its body, and `request`, and that returns a Response."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        request, handler = LeanRequest(scope, receive, send), scope["route_handler"]
        try:
            response = await handler.fn(data=await _data(request, handler), request=request)
        except Exception as error:
            response = answer_to(request, error)
        await response.to_asgi_response(None, request)(scope, receive, send)

    return called


async def _data(request: LeanRequest, handler: Any) -> Any:
    body = await request.body()
    if not body:
        raise BadRequest("the body is empty; send a JSON object")
    return decode(body, decoder_of(handler))
