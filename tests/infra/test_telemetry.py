"""Traces: one from the gateway through attempts to delivery, off by default, bounded at the end, without text."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infra.contracts import Job, JobError, Outcome
from infra.span_names import job_attributes, outcome_attributes, process_name, request_attributes, request_name
from infra.states import Status
from infra.telemetry import Telemetry, is_wanted
from tests.infra.jobs_for_tests import new_job, success

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _job(attempt: int, traceparent: str | None) -> Job:
    new = new_job(1)
    return Job(
        id=new.id, spec=new.spec, status=Status.RUNNING, lane=1, tier=new.tier, priority=0, tenant="default",
        cost_tokens=1, attempt=attempt, lost_count=0, num_events=2, created_ms=0, traceparent=traceparent,
    )  # fmt: skip


def test_one_trace_from_the_caller_to_the_delivery() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.start("test", exporter=exporter)
    spec = new_job(1).spec
    request = telemetry.span(request_name(spec), kind="server", parent=CALLER, attributes=request_attributes(spec))
    with request:
        record = request.traceparent
    for attempt in (1, 2):
        job = _job(attempt, record)
        process = telemetry.span(
            process_name(job), kind="consumer", parent=record, links=[record], attributes=job_attributes(job)
        )
        with process:
            process.event("prefill", {"num_tokens": 5})
            if attempt == 2:
                process.set(outcome_attributes(success("secret answer", 1)))
    with telemetry.span("deliver webhook", kind="client", parent=record):
        pass
    telemetry.close()

    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [
        "text_completion model",
        "process model",
        "process model",
        "deliver webhook",
    ]
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {CALLER.split("-")[1]}
    first, *others = spans
    assert first.parent is not None and first.context is not None
    assert f"{first.parent.span_id:016x}" == CALLER.split("-")[2]
    assert all(span.parent and span.parent.span_id == first.context.span_id for span in others)
    assert all(span.end_time is not None for span in spans)
    processes = spans[1:3]
    assert [[link.context.span_id for link in span.links] for span in processes] == [[first.context.span_id]] * 2
    attributes = dict(processes[1].attributes or {})
    assert attributes["millstream.attempt"] == 2
    assert attributes["gen_ai.usage.output_tokens"] == 1
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.request.max_tokens"] == 8
    assert attributes["gen_ai.latency.time_in_model_prefill"] == 0.25
    told = "".join(span.to_json() for span in spans)
    assert "secret answer" not in told and "Once upon" not in told


def test_errors_are_told_by_their_type_alone() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.start("test", exporter=exporter)
    with pytest.raises(RuntimeError), telemetry.span("process model"):
        raise RuntimeError("canary: Once upon a time")
    error = JobError(code="worker_lost", message="canary")
    with telemetry.span("process model") as span:
        span.set(outcome_attributes(Outcome(status=Status.FAILED, error=error)))
    telemetry.close()
    first, second = exporter.get_finished_spans()
    assert (first.attributes or {})["error.type"] == "RuntimeError" and not first.status.is_ok
    assert (second.attributes or {})["error.type"] == "worker_lost"
    assert "canary" not in first.to_json() + second.to_json()


@pytest.mark.parametrize("parent", [None, "", "nonsense", "00-0-0-00", CALLER.replace("-01", "")])
def test_a_broken_context_starts_a_trace_of_its_own(parent: str | None) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.start("test", exporter=exporter)
    with telemetry.span("process model", parent=parent, links=[parent]):
        pass
    telemetry.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and not span.links


def test_a_span_ends_once() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.start("test", exporter=exporter)
    with telemetry.span("process model") as span:
        span.end()
    span.end()
    telemetry.close()
    assert len(exporter.get_finished_spans()) == 1


def test_off_hands_the_callers_context_on() -> None:
    telemetry = Telemetry()
    with telemetry.span("x", parent=CALLER, links=[None]) as span:
        span.set({"a": 1})
        span.event("e")
        span.fail("t")
        assert span.traceparent == CALLER
    assert not telemetry.is_on
    telemetry.close()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
    ],
)
def test_traces_are_off_unless_asked_for(environment: dict[str, str], expected: bool) -> None:
    assert is_wanted(environment) is expected


def test_off_imports_nothing() -> None:
    script = (
        "import sys; from infra.telemetry import Telemetry; t = Telemetry.start('x')\n"
        "with t.span('a'): pass\nt.close(); print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PATH": ""}
    )
    assert answer.stdout.strip() == "[]"


class _DeadCollector(SpanExporter):
    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.released.wait(60)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


def test_a_dead_collector_does_not_hold_up_the_exit() -> None:
    exporter = _DeadCollector()
    telemetry = Telemetry.start("test", exporter=exporter)
    with telemetry.span("process model"):
        pass
    start = time.monotonic()
    telemetry.close(timeout_seconds=0.1)
    assert time.monotonic() - start < 20
    exporter.released.set()
