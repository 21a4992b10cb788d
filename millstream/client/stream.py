"""A job's events as they happen: numbered, whole, each once, over as many connections as it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import msgspec

from api_gateway.schemas.jobs import EventView
from infra.states import TERMINAL
from millstream.client.caller import Caller
from millstream.client.errors import ApiError, BrokenStream
from millstream.client.retry import MAX_TRIES, delay_before_retry

_LAST_TYPES = frozenset(f"job.{status}" for status in TERMINAL)


def stream_events(caller: Caller, job_id: str, *, after: int, patience_seconds: float) -> Iterator[EventView]:
    """Events with numbers above `after`, up to the one that ends the job.

    A connection that breaks, or is ended by a gateway that shuts down, is made anew from the last event received.
    Raises BrokenStream once nothing has come for `patience_seconds`, ApiError (410) where the log has expired.
    """
    num_breaks = 0
    last_progress = time.monotonic()
    while True:
        reason = "it was closed before the job's end"
        try:
            for event in _one_connection(caller, job_id, after):
                if event.sequence_number <= after:
                    continue
                if event.sequence_number > after + 1:
                    reason = f"event {after + 1} is missing before {event.sequence_number}"
                    break
                after = event.sequence_number
                num_breaks, last_progress = 0, time.monotonic()
                yield event
                if event.type in _LAST_TYPES:
                    return
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        except ApiError as error:
            if error.status not in (502, 503, 504):
                raise
            reason = error.message
        num_breaks += 1
        if time.monotonic() - last_progress > patience_seconds:
            raise BrokenStream(
                f"the events of {job_id} broke off after number {after} ({reason}) and could not be resumed within "
                f"{patience_seconds:g} s"
            )
        time.sleep(delay_before_retry(min(num_breaks, MAX_TRIES - 1)) or 0.0)


def _one_connection(caller: Caller, job_id: str, after: int) -> Iterator[EventView]:
    from millstream.client.sse import SseParser

    headers = {"accept": "text/event-stream"}
    if after >= 0:
        headers["last-event-id"] = str(after)
    parser = SseParser()
    with caller.stream(f"/v1/jobs/{job_id}/events", headers=headers) as chunks:
        for chunk in chunks:
            for event in parser.feed(chunk):
                yield msgspec.json.decode(event.data, type=EventView)
