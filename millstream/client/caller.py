"""Calls to the gateway: JSON in and out, retried where that is safe, errors with the gateway's own words."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
import msgspec

from api_gateway.schemas.errors import ErrorBody
from millstream.client.errors import ApiError, CannotConnect, ClientClosed
from millstream.client.retry import delay_after_status, delay_before_retry

Answer = TypeVar("Answer")

CONNECT_SECONDS = 5.0
STREAM_READ_SECONDS = 60.0  # a stream is never silent for so long: the gateway sends keepalives


class Caller:
    """One gateway. A call may be made twice: it must be safe to repeat, by its method or by an idempotency key."""

    def __init__(self, url: str, *, api_key: str | None, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        if not self.url.startswith(("http://", "https://")):
            raise CannotConnect(f"{url!r} is not the URL of a gateway; those look like http://host:8080", param="url")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers)
        except httpx.InvalidURL as error:
            raise CannotConnect(f"{url!r} is not a URL: {error}", param="url") from error

    def call(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_seconds: float = 0.0,
    ) -> Answer:
        """The decoded answer. `wait_seconds` is how long the gateway may take its time beyond the usual.

        Raises CannotConnect, ClientClosed, or ApiError with what the gateway said.
        """
        request = self._http.build_request(
            method,
            path,
            params={name: value for name, value in (query or {}).items() if value is not None},
            content=None if body is None else msgspec.json.encode(body),
            headers={"content-type": "application/json", **(headers or {})},
            timeout=httpx.Timeout(self._timeout_seconds + wait_seconds, connect=CONNECT_SECONDS),
        )
        num_tries = 0
        while True:
            num_tries += 1
            try:
                response = self._opened().send(request)
            except httpx.TransportError as error:
                delay = delay_before_retry(num_tries)
                if delay is None:
                    raise self._cannot_connect(error) from error
            else:
                if response.is_success:
                    return _decoded(response, answer)
                delay = delay_after_status(response.status_code, response.headers, num_tries, datetime.now(UTC))
                if delay is None:
                    raise error_of(response)
            time.sleep(delay)

    @contextmanager
    def stream(self, path: str, *, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """An answer whose bytes are read as they come; one try. Raises httpx.TransportError where it breaks."""
        timeout = httpx.Timeout(STREAM_READ_SECONDS, connect=CONNECT_SECONDS)
        with self._opened().stream("GET", path, headers=headers, timeout=timeout) as response:
            if not response.is_success:
                response.read()
                raise error_of(response)
            yield response

    def close(self) -> None:
        self._http.close()

    def _opened(self) -> httpx.Client:
        """The connections; a thread that still reads when the client is closed ends with ClientClosed."""
        if self._http.is_closed:
            raise ClientClosed
        return self._http

    def _cannot_connect(self, error: httpx.TransportError) -> CannotConnect:
        reason = str(error) or type(error).__name__
        return CannotConnect(
            f"no answer from {self.url} ({reason}); is it running? Start one with `millstream up`, "
            "or name another with --url or MILLSTREAM_URL"
        )


def _decoded(response: httpx.Response, answer: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(response.content, type=answer)
    except msgspec.DecodeError as error:
        raise ApiError(
            f"{response.url} answered with something that is not understood ({error}); is it a Millstream gateway "
            "of this version?",
            status=response.status_code,
            request_id=response.headers.get("x-request-id"),
        ) from error


def error_of(response: httpx.Response) -> ApiError:
    """What the gateway said is wrong; a proxy's answer in other words is quoted."""
    request_id = response.headers.get("x-request-id")
    try:
        detail = msgspec.json.decode(response.content, type=ErrorBody).error
    except msgspec.DecodeError:
        said = response.text[:300].strip() or response.reason_phrase
        return ApiError(f"{response.url} answered {response.status_code}: {said}", status=response.status_code,
                        request_id=request_id)  # fmt: skip
    return ApiError(
        detail.message, status=response.status_code, code=detail.code, param=detail.param, request_id=request_id
    )
