"""Prometheus metrics of a worker, under the names that vLLM's dashboards know, with our prefix. No tenants, no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.errors import MillstreamError
from worker.attempt import Attempt, Commit
from worker.engine_thread import Report

if TYPE_CHECKING:
    from engine.stats import EngineStats

_PREFIX = "millstream_"
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # steps, gaps between tokens
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)

# name: help, figure
_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Sequences that the engine runs", lambda stats: stats.num_running),
    "num_requests_waiting": ("Sequences that wait in the engine", lambda stats: stats.num_waiting),
    "num_requests_swapped": ("Waiting sequences whose blocks are in host memory", lambda stats: stats.num_swapped),
    "kv_cache_usage_perc": ("Share of the KV blocks that is held, 0 to 1", lambda stats: stats.kv_usage),
    "kv_waste_perc": ("Share of the held KV slots that holds no token, 0 to 1", lambda stats: stats.kv_waste),
    "batch_occupancy": ("Running sequences over max_num_seqs", lambda stats: stats.num_running / stats.max_num_seqs),
}
# name: help, name of the label, (its value, figure)...
_COUNTERS: dict[str, tuple[str, str | None, dict[str, Callable[[EngineStats], int]]]] = {
    "prompt_tokens": ("Tokens of prompts added", None, {"": lambda stats: stats.num_prompt_tokens}),
    "generation_tokens": ("Tokens generated", None, {"": lambda stats: stats.num_generated_tokens}),
    "prefix_cache_queries": ("Prompt tokens looked up", None, {"": lambda stats: stats.num_prefix_queried_tokens}),
    "prefix_cache_hits": ("Prompt tokens found cached", None, {"": lambda stats: stats.num_prefix_hit_tokens}),
    "num_preemptions": ("Sequences that lost their blocks", "mode", {
        "recompute": lambda stats: stats.num_preempted_recompute,
        "swap": lambda stats: stats.num_preempted_swap,
    }),
    "spec_decode_num_draft_tokens": ("Proposed tokens that were verified", None, {
        "": lambda stats: stats.num_drafted_tokens,
    }),
    "spec_decode_num_accepted_tokens": ("Proposed tokens that were accepted", None, {
        "": lambda stats: stats.num_accepted_tokens,
    }),
    "swap_blocks": ("KV blocks moved", "direction", {
        "out": lambda stats: stats.num_swapped_out_blocks,
        "in": lambda stats: stats.num_swapped_in_blocks,
    }),
}  # fmt: skip


class MetricsPortTaken(MillstreamError):
    """The port for metrics cannot be listened on; name another with --metrics-port."""


class EngineCollector(Collector):
    """The engine's own figures, read when they are asked for."""

    def __init__(self, alias: str, stats: Callable[[], EngineStats]) -> None:
        self._alias = alias
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, (about, figure) in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, about, labels=["model_name"])
            gauge.add_metric([self._alias], figure(stats))
            yield gauge
        for name, (about, label, figures) in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, about, labels=["model_name", *([label] if label else [])])
            for value, count in figures.items():
                counter.add_metric([self._alias, *([value] if label else [])], count(stats))
            yield counter


@dataclass(slots=True)
class _Times:
    """Of one attempt, in seconds of the monotonic clock."""

    claimed: float
    queue_seconds: float | None  # from submit to claim, on the store's clock; None for a later attempt
    last_emitted: float | None = None


class Metrics:
    """An observer of the bridge. The registry is its own, so that a process may hold many."""

    def __init__(self, alias: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(alias, stats))
        self._alias = alias
        self._times: dict[str, _Times] = {}  # by request id
        self._first_token = self._histogram("time_to_first_token_seconds", "From submit, of first attempts", _LONG)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two steps that gave a job tokens", _SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", "From submit to the end, of first attempts", _LONG)
        self._queued = self._histogram("request_queue_time_seconds", "From submit to the first claim", _LONG)
        self._prefill = self._histogram("request_prefill_time_seconds", "In the engine, to the first token", _LONG)
        self._decode = self._histogram("request_decode_time_seconds", "In the engine, after the first token", _LONG)
        self._step = self._histogram("step_seconds", "One step of the engine", _SHORT)
        self._success = self._counter("request_success", "Choices that finished", "finish_reason")
        self._jobs = self._counter("jobs", "Attempts that this worker ended", "outcome")
        self._reclaims = self._counter("lease_reclaims", "Claims of jobs that another worker had lost")
        self._fenced = self._counter("fenced_writes", "Attempts that ended elsewhere while they ran here")

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(_PREFIX + name, about, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self._alias)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, about, ["model_name", *labels], registry=self.registry)

    @contextmanager
    def served(self, port: int) -> Iterator[None]:
        """Serves `/metrics` on `port` from a thread; 0: does not. Raises MetricsPortTaken."""
        if port == 0:
            yield
            return
        try:
            server, thread = start_http_server(port, registry=self.registry)
        except OSError as error:
            raise MetricsPortTaken(
                f"metrics cannot be served on port {port}: {error}; name another with --metrics-port"
            ) from error
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    # --- observer ---

    def claimed(self, attempt: Attempt) -> None:
        job = attempt.job
        is_first = job.attempt == 1 and job.started_ms is not None
        queue_seconds = max(0, (job.started_ms or 0) - job.created_ms) / 1000 if is_first else None
        self._times[attempt.request_id] = _Times(time.monotonic(), queue_seconds)
        if queue_seconds is not None:
            self._queued.observe(queue_seconds)
        if attempt.was_lost_before:
            self._reclaims.labels(self._alias).inc()

    def stepped(self, report: Report) -> None:
        if report.step_seconds is not None:
            self._step.observe(report.step_seconds)

    def emitted(self, attempt: Attempt, num_tokens: int) -> None:
        times = self._times.get(attempt.request_id)
        if times is None or num_tokens == 0:
            return
        now = time.monotonic()
        if times.last_emitted is not None:
            self._gap.observe(now - times.last_emitted)
        elif times.queue_seconds is not None:
            self._first_token.observe(times.queue_seconds + now - times.claimed)
        times.last_emitted = now

    def ended(self, attempt: Attempt) -> None:
        times = self._times.pop(attempt.request_id)
        if not isinstance(attempt.end, Commit):
            self._jobs.labels(self._alias, attempt.end.reason if attempt.end else "lost").inc()
            return
        outcome = attempt.end.outcome
        self._jobs.labels(self._alias, outcome.status.value).inc()
        for choice in attempt.progress.choices:
            if choice.finish_reason is not None:
                self._success.labels(self._alias, choice.finish_reason).inc()
        if times.queue_seconds is not None:
            self._whole.observe(times.queue_seconds + time.monotonic() - times.claimed)
        if outcome.timeline:
            self._prefill.observe(outcome.timeline["prefill_seconds"])
            self._decode.observe(outcome.timeline["decode_seconds"])

    def lost(self, attempt: Attempt) -> None:
        self._times.pop(attempt.request_id)
        self._fenced.labels(self._alias).inc()
