"""Every error leaves the gateway in one shape: OpenAI's, so that the clients people already have understand it."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.routes import HTTPRoute

from api_gateway.request_ids import request_id
from api_gateway.schemas.errors import ErrorBody, ErrorDetail
from engine.errors import InvalidRequest
from infra.contracts import JobError
from infra.errors import BadRequest, Conflict, MillstreamError, QueueFull

log = logging.getLogger("millstream.gateway")

AnyRequest = Request[Any, Any, Any]


class Unauthorized(MillstreamError):
    """Send an API key: `Authorization: Bearer <key>`."""

    status = 401
    code = "invalid_api_key"


class NotLocal(MillstreamError):
    """No API key is configured: only this machine is served, as localhost; set MILLSTREAM_API_KEYS to serve others."""

    status = 403
    code = "not_local"


class NotOperator(MillstreamError):
    """No admin key is configured: lanes are paused from this machine alone; set MILLSTREAM_ADMIN_KEYS."""

    status = 403
    code = "not_operator"


class BodyTooLarge(MillstreamError):
    """The request body is too large."""

    status = 413
    code = "request_too_large"


class NotSupported(BadRequest):
    """This is not supported."""

    code = "not_supported"


class CardUnusable(MillstreamError):
    """What the model's workers wrote of it cannot be used; start one of them again, and look at its log."""

    status = 503
    code = "model_unusable"
    retryable = True


class DeadlineInfeasible(MillstreamError):
    """The deadline cannot be met."""

    status = 422
    code = "deadline_infeasible"


class Throttled(QueueFull):
    """As many jobs are waiting as this queue takes; try again when some have been worked off."""

    def __init__(self, message: str | None = None, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class GatewayClosing(MillstreamError):
    """This gateway is shutting down; the job goes on."""

    status = 503
    code = "gateway_closing"
    retryable = True


class ClientGone(MillstreamError):
    """The client hung up before the answer was there."""

    status = 499
    code = "client_closed_request"


class JobCancelled(Conflict):
    """The job was cancelled before it ended."""

    code = "job_cancelled"


class JobExpired(MillstreamError):
    """The job was not started or not finished in time."""

    status = 504
    code = "job_expired"


class JobFailed(MillstreamError):
    """The job failed; the error's code and message are the job's own."""

    def __init__(self, error: JobError) -> None:
        super().__init__(error.message, param=error.param)
        self.code = error.code
        self.status = 400 if error.code in CALLERS_FAULTS else 500


# Codes of failed jobs and documents that tell of the request, not of the service.
CALLERS_FAULTS = frozenset(
    {"invalid_request", "context_length_exceeded", "not_supported", "empty_document", "unsupported_type", "not_utf8"}
)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_type(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def detail_of(error: MillstreamError) -> ErrorDetail:
    return ErrorDetail(message=error.message, type=error_type(error.status), param=error.param, code=error.code)


def headers_of(error: MillstreamError) -> dict[str, str]:
    """`x-should-retry` tells clients what their own rules of thumb would get wrong; Retry-After is in whole seconds."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if isinstance(error, Throttled):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    elif error.status == 503:
        headers["retry-after"] = "1"
    return headers


def from_invalid(error: InvalidRequest) -> MillstreamError:
    """The engine's refusal of a parameter, as the gateway's."""
    return BadRequest(error.message, param=error.param)


def on_millstream_error(request: AnyRequest, error: MillstreamError) -> Response[ErrorBody]:
    if error.status >= 500:
        log.warning("%s %s %s: %s", request_id(request.scope), request.method, request.url.path, error.message)
    return Response(ErrorBody(error=detail_of(error)), status_code=error.status, headers=headers_of(error))


def on_invalid_request(request: AnyRequest, error: InvalidRequest) -> Response[ErrorBody]:
    return on_millstream_error(request, from_invalid(error))


def on_http_exception(request: AnyRequest, error: HTTPException) -> Response[ErrorBody]:
    """What the framework refuses: unknown paths, wrong methods, bodies over the limit, bad query parameters."""
    response = on_millstream_error(request, _framework_error(request, error))
    if error.status_code == 405:
        response.headers["allow"] = ", ".join(_methods_at(request))
    return response


def _methods_at(request: AnyRequest) -> list[str]:
    """What is answered at a path: the framework does not say."""
    for route in request.app.routes:
        pattern = "".join(
            re.escape(f"/{part}") if isinstance(part, str) else "/.+" if part.type is Path else "/[^/]+"
            for part in route.path_components
        )
        if isinstance(route, HTTPRoute) and re.fullmatch(pattern, request.url.path):
            return sorted(route.methods)
    return []


def on_unexpected(request: AnyRequest, error: Exception) -> Response[ErrorBody]:
    log.error("%s %s %s failed", request_id(request.scope), request.method, request.url.path, exc_info=error)
    detail = ErrorDetail(message=MillstreamError().message, type="server_error", param=None, code="internal_error")
    return Response(ErrorBody(error=detail), status_code=500)


def answer_to(request: AnyRequest, error: Exception) -> Response[Any]:
    """What a request is answered that ended in `error`, as the framework would choose it."""
    return next(ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS)(request, error)


# By class; the most special one counts.
ANSWERS: dict[int | type[Exception], Callable[[AnyRequest, Any], Response[Any]]] = {
    MillstreamError: on_millstream_error,
    InvalidRequest: on_invalid_request,
    HTTPException: on_http_exception,
    Exception: on_unexpected,
}


def _framework_error(request: AnyRequest, error: HTTPException) -> MillstreamError:
    path = request.url.path
    match error.status_code:
        case 404:
            wrapped = MillstreamError(f"there is nothing at {path}; GET /openapi.json lists what there is")
            wrapped.code = "not_found"
        case 405:
            wrapped = MillstreamError(f"{request.method} is not answered at {path}; see the Allow header")
            wrapped.code = "method_not_allowed"
        case 413:
            limit = request.route_handler.resolve_request_max_body_size()
            return BodyTooLarge(f"the body is over {limit} bytes; send large inputs by URI or in several requests")
        case 400 if isinstance(error, ValidationException):
            return _bad_parameter(error)
        case _:
            wrapped = MillstreamError(error.detail)
            wrapped.code = "invalid_request" if error.status_code < 500 else "internal_error"
    wrapped.status = error.status_code
    return wrapped


def _bad_parameter(error: ValidationException) -> BadRequest:
    extras = error.extra if isinstance(error.extra, list) else []
    for extra in extras:
        if extra.get("source") == "body":
            return BadRequest("the body is empty; send a JSON object", param=None)
        return BadRequest(
            f"{extra.get('key')}: {extra.get('message')}; /docs has what it takes", param=extra.get("key")
        )
    return BadRequest(error.detail)
