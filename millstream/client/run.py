"""A run (a bulk summarization) as its client holds it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from api_gateway.schemas.runs import ReportView, RunOut
from infra.states import TERMINAL, Status
from millstream.client.caller import Caller
from millstream.client.errors import WaitedTooLong
from millstream.client.job import JobHandle

_FIRST_POLL_SECONDS = 0.1
_MAX_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class RunHandle:
    """Names a run; every method asks the gateway for what is true now."""

    id: str
    _caller: Caller = field(repr=False)

    def get(self) -> RunOut:
        """The run with all of its documents, their chunks counted, and their summaries as far as they are written."""
        return self._caller.call("GET", self._path, RunOut)

    def wait(self, timeout_seconds: float | None = None) -> RunOut:
        """Returns when the run has ended, however it did. Raises WaitedTooLong."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        pause = _FIRST_POLL_SECONDS
        while True:
            run = self.get()
            if Status(run.status) in TERMINAL:
                return run
            if end is not None and time.monotonic() >= end:
                raise WaitedTooLong(f"{self.id} is {run.status} after {timeout_seconds:g} s; it goes on")
            time.sleep(pause if end is None else min(pause, max(end - time.monotonic(), 0.0)))
            pause = min(pause * 1.5, _MAX_POLL_SECONDS)

    def job(self, job_id: str) -> JobHandle:
        """One of its jobs: a document's `streaming_job_id` names the one that writes the summary."""
        return JobHandle(job_id, self._caller)

    def report(self) -> ReportView:
        """What the run did so far, every byte and every failure accounted for."""
        return self._caller.call("GET", f"{self._path}/report", ReportView)

    def cancel(self) -> RunOut:
        """Ends the run and its jobs, if it has not ended."""
        return self._caller.call("POST", f"{self._path}/cancel", RunOut)

    @property
    def _path(self) -> str:
        return f"/v1/runs/{self.id}"
