"""Traces by OpenTelemetry, only where `OTEL_*` asks for them; otherwise nothing is imported and nothing costs.

    telemetry = Telemetry.start("worker")
    with telemetry.span("process model", kind="consumer", parent=job.traceparent, links=[job.traceparent]) as span:
        span.event("prefill", {...})
    telemetry.close()

Start it in the process that uses it, after any fork: its exporter is a thread. W3C trace contexts (`traceparent`)
travel in job records. Attributes hold names, counts and times, never text of prompts or answers: `infra.span_names`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan

Kind = Literal["internal", "server", "client", "producer", "consumer"]
AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_FLUSH_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Span:
    """One span, ended once: as a context manager, or by `end` where it outlives a block.

    Without telemetry it does nothing and hands its parent's context on.
    """

    def __init__(self, span: OtelSpan | None, parent: str | None) -> None:
        self._span = span
        self._parent = parent

    @property
    def traceparent(self) -> str | None:
        """The context to put into records and headers, so that what follows belongs to this span."""
        if self._span is None:
            return self._parent
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, attributes: Attributes) -> None:
        if self._span is not None:
            self._span.set_attributes(dict(attributes))

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        if self._span is not None:
            self._span.add_event(name, dict(attributes or {}))

    def fail(self, error_type: str) -> None:
        """Marks the span as failed. `error_type` is a code or a class name, never a message: those may quote text."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error_type)
            self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        if self._span is not None and self._span.is_recording():
            self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        if kind is not None:
            self.fail(kind.__name__)
        self.end()


class Telemetry:
    """A process's traces. `start` makes one; without a provider it is off."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("millstream")

    @classmethod
    def start(cls, process: str, *, exporter: SpanExporter | None = None) -> Telemetry:
        """Traces of `process` ("gateway", "worker", ...) to where `OTEL_*` says, or to `exporter`; else off."""
        if exporter is None and not is_wanted(os.environ):
            return cls()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        names = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or f"millstream-{process}"}
        provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter or _exporter()))
        return cls(provider)

    @property
    def is_on(self) -> bool:
        return self._provider is not None

    def span(self, name: str, *, kind: Kind = "internal", parent: str | None = None,
             links: Sequence[str | None] = (), attributes: Attributes | None = None) -> Span:  # fmt: skip
        """A started span below `parent`, linked to `links`: contexts as `traceparent` writes them; broken ones count
        as none."""
        if self._tracer is None:
            return Span(None, parent)
        from opentelemetry import trace

        contexts = [trace.get_current_span(_context(link)).get_span_context() for link in links if link]
        span = self._tracer.start_span(
            name,
            context=_context(parent),
            kind=trace.SpanKind[kind.upper()],
            links=[trace.Link(context) for context in contexts if context.is_valid],
            attributes=dict(attributes or {}),
        )
        return Span(span, parent)

    def close(self, *, timeout_seconds: float = _FLUSH_SECONDS) -> None:
        """Sends what is pending, for a bounded time: a collector that is down must not hold up an exit."""
        if self._provider is None:
            return
        flush = threading.Thread(target=self._provider.shutdown, name="telemetry-flush", daemon=True)
        flush.start()
        flush.join(timeout_seconds)
        if flush.is_alive():
            _log.warning("telemetry: gave up sending spans after %.0f s", timeout_seconds)


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for traces: an OTLP endpoint or an exporter is named, and nothing turns it off."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    if exporter:
        return exporter != "none"
    return bool(environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def _exporter() -> SpanExporter:
    if os.environ.get("OTEL_TRACES_EXPORTER") == "console":
        import sys

        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf") != "http/protobuf":
        _log.warning("telemetry: OTEL_EXPORTER_OTLP_PROTOCOL is ignored; spans are sent as http/protobuf")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _context(traceparent: str | None) -> Context:
    """The context that a `traceparent` names; an empty one for none or a broken one."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent} if traceparent else {}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())
