"""One span per attempt, in the trace that the gateway began. Names and figures only, never text."""

from __future__ import annotations

from infra.span_names import job_attributes, outcome_attributes, process_name
from infra.telemetry import Span, Telemetry
from worker.attempt import Attempt, Commit
from worker.engine_thread import Report


class Traces:
    """An observer of the bridge."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._spans: dict[str, Span] = {}  # by request id
        self._silent: set[str] = set()  # of those, the attempts that have emitted nothing yet

    def claimed(self, attempt: Attempt) -> None:
        job = attempt.job
        self._spans[attempt.request_id] = self._telemetry.span(
            process_name(job),
            kind="consumer",
            parent=job.traceparent,
            links=[job.traceparent],
            attributes=job_attributes(job),
        )
        self._silent.add(attempt.request_id)

    def stepped(self, report: Report) -> None:
        """Steps belong to no one job."""

    def emitted(self, attempt: Attempt, num_tokens: int) -> None:
        if attempt.request_id in self._silent and num_tokens:
            self._silent.discard(attempt.request_id)
            self._spans[attempt.request_id].event(
                "first_token",
                {
                    "gen_ai.usage.input_tokens": attempt.progress.num_prompt_tokens or 0,
                    "gen_ai.usage.cache_read.input_tokens": attempt.progress.num_cached_tokens or 0,
                },
            )

    def ended(self, attempt: Attempt) -> None:
        span = self._taken(attempt)
        if isinstance(attempt.end, Commit):
            outcome = attempt.end.outcome
            span.set(outcome_attributes(outcome))
            for name in ("num_preemptions", "num_swaps"):
                if count := outcome.timeline.get(name):
                    span.event(name, {"count": int(count)})
            if outcome.error is not None:
                span.fail(outcome.error.code)
        elif attempt.end is not None:
            span.event(attempt.end.reason, {"num_completion_tokens": attempt.progress.num_completion_tokens})
            if attempt.end.reason == "retry":
                span.fail("retry")
        span.end()

    def lost(self, attempt: Attempt) -> None:
        span = self._taken(attempt)
        span.fail("lost")
        span.end()

    def _taken(self, attempt: Attempt) -> Span:
        self._silent.discard(attempt.request_id)
        return self._spans.pop(attempt.request_id)
