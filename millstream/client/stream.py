"""A job's events as they happen: numbered, whole, each once, over as many connections as it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import msgspec

from api_gateway.schemas.errors import ErrorBody
from api_gateway.schemas.jobs import EventView
from infra.states import TERMINAL
from millstream.client.caller import Caller
from millstream.client.errors import ApiError, BrokenStream
from millstream.client.retry import MAX_TRIES, delay_before_retry
from millstream.client.sse import SseParser

NO_CONTENT = 204
_STEADY_SECONDS = 10.0  # a connection that held for so long was a good one

_LAST_TYPES = frozenset(f"job.{status}" for status in TERMINAL)
_PASSING = frozenset({429, 502, 503, 504})


def stream_events(caller: Caller, job_id: str, *, after: int, patience_seconds: float) -> Iterator[EventView]:
    """Events with numbers above `after`, up to the one that ends the job.

    A connection that breaks, or is ended by a gateway that shuts down, is made anew from the last event received.
    Raises BrokenStream where that fails for `patience_seconds`, ApiError (410) where the log has expired.
    """
    num_breaks = 0
    broken_since: float | None = None
    while True:
        contact = _Contact()
        try:
            with caller.stream(f"/v1/jobs/{job_id}/events", headers=_headers(after)) as response:
                if response.status_code == NO_CONTENT:  # nothing comes after that number
                    return
                for event in _events(contact.noting(response.iter_raw())):
                    if event.sequence_number <= after:
                        continue
                    if event.sequence_number > after + 1:
                        raise _BrokenOff(f"event {after + 1} is missing before {event.sequence_number}")
                    after = event.sequence_number
                    num_breaks, broken_since = 0, None
                    yield event
                    if event.type in _LAST_TYPES:
                        return
            reason = "it was closed before the job's end"
        except (httpx.TransportError, _BrokenOff) as error:
            reason = str(error) or type(error).__name__
        except ApiError as error:
            if error.status not in _PASSING:
                raise
            reason = error.message
        num_breaks += 1
        now = time.monotonic()
        if broken_since is None or contact.held_seconds > _STEADY_SECONDS:
            broken_since = now
        if now - broken_since > patience_seconds:
            raise BrokenStream(
                f"the events of {job_id} broke off after number {after} ({reason}) and could not be resumed within "
                f"{patience_seconds:g} s"
            )
        time.sleep(delay_before_retry(min(num_breaks, MAX_TRIES - 1)) or 0.0)


class _Contact:
    """How long a connection carried something, be it keepalives of a job that waits in the queue."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    @property
    def held_seconds(self) -> float:
        return self._last - self._began

    def noting(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._last = time.monotonic()
            yield chunk


class _BrokenOff(Exception):
    """The stream cannot go on over this connection."""


def _headers(after: int) -> dict[str, str]:
    accept = {"accept": "text/event-stream", "accept-encoding": "identity"}
    return accept | {"last-event-id": str(after)} if after >= 0 else accept


def _events(chunks: Iterator[bytes]) -> Iterator[EventView]:
    parser = SseParser()
    for chunk in chunks:
        for event in parser.feed(chunk):
            if event.event == "error":  # the gateway cannot go on, and says why
                raise _BrokenOff(msgspec.json.decode(event.data, type=ErrorBody).error.message)
            yield msgspec.json.decode(event.data, type=EventView)
