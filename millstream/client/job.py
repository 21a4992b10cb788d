"""A job as its client holds it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from api_gateway.schemas.jobs import EventView, JobView, ResultView
from infra.states import TERMINAL, Status
from millstream.client.caller import Caller
from millstream.client.errors import NotSucceeded, WaitedTooLong
from millstream.client.stream import stream_events

_LONG_POLL_SECONDS = 30.0


@dataclass(frozen=True)
class JobHandle:
    """Names a job; every method asks the gateway for what is true now."""

    id: str
    _caller: Caller = field(repr=False)

    def get(self) -> JobView:
        return self._caller.call("GET", self._path, JobView)

    def wait(self, timeout_seconds: float | None = None) -> JobView:
        """Returns when the job has ended, however it did. Raises WaitedTooLong."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            left = _LONG_POLL_SECONDS if end is None else min(max(end - time.monotonic(), 0.0), _LONG_POLL_SECONDS)
            job = self._caller.call("GET", self._path, JobView, query={"wait": round(left, 3)}, wait_seconds=left)
            if Status(job.status) in TERMINAL:
                return job
            if end is not None and time.monotonic() >= end:
                raise WaitedTooLong(f"{self.id} is {job.status} after {timeout_seconds:g} s; it goes on")

    def result(self, timeout_seconds: float | None = None) -> ResultView:
        """Waits for the result. Raises NotSucceeded with the job's error where there is none."""
        job = self.wait(timeout_seconds)
        if job.status != Status.SUCCEEDED or job.result is None:
            reason = f": {job.error.message}" if job.error else ""
            raise NotSucceeded(f"{self.id} has {job.status}{reason}")
        return job.result

    def stream(self, *, after: int = -1, patience_seconds: float = 60.0) -> Iterator[EventView]:
        """The job's events above number `after`, each once, until its end; survives broken connections.

        Raises BrokenStream once nothing could be received for `patience_seconds`.
        """
        return stream_events(self._caller, self.id, after=after, patience_seconds=patience_seconds)

    def texts(self, index: int = 0) -> Iterator[str]:
        """The text of choice `index`, piece by piece as it is generated. Raises NotSucceeded if the job fails."""
        for event in self.stream():
            for delta in event.deltas or ():
                if delta.index == index and delta.text:
                    yield delta.text
            if event.error is not None:
                raise NotSucceeded(f"{self.id} has {event.type.removeprefix('job.')}: {event.error.message}")

    def cancel(self) -> JobView:
        """Ends the job if it has not ended; what it had generated so far is its result."""
        return self._caller.call("POST", f"{self._path}/cancel", JobView)

    @property
    def _path(self) -> str:
        return f"/v1/jobs/{self.id}"
