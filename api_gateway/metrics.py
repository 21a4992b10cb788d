"""What a gateway tells Prometheus. No tenant, no prompt, no key is ever a label.

Depths and backlogs are those of the whole queue: every gateway reports the same, so take the maximum over gateways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from api_gateway import eta
from api_gateway.outlook import Outlook

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(slots=True)
class Metrics:
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    # By their labels' values, of which there are few: the library looks each up anew under a lock.
    requests: Callable[[str, str, str], Counter] = field(init=False)
    request_seconds: Callable[[str, str], Histogram] = field(init=False)
    admitted: Callable[[str, str], Counter] = field(init=False)
    event_streams_open: Gauge = field(init=False)
    lane_depth: Gauge = field(init=False)
    lane_running: Gauge = field(init=False)
    lane_paused: Gauge = field(init=False)
    backlog_seconds: Gauge = field(init=False)
    workers: Gauge = field(init=False)

    def __post_init__(self) -> None:
        registry = self.registry
        requests = Counter(
            "millstream_http_requests", "Requests answered", ("method", "route", "status"), registry=registry
        )
        request_seconds = Histogram(
            "millstream_http_request_duration_seconds", "Until the answer's end", ("method", "route"),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        admitted = Counter("millstream_jobs_admitted", "Jobs put on the queue", ("model", "tier"), registry=registry)
        self.requests, self.request_seconds = cache(requests.labels), cache(request_seconds.labels)
        self.admitted = cache(admitted.labels)
        self.event_streams_open = Gauge("millstream_event_streams_open", "Event streams being sent", registry=registry)
        self.lane_depth = Gauge(
            "millstream_lane_depth",
            "Jobs that wait, delayed ones included",
            ("model", "lane", "tier"),
            registry=registry,
        )
        self.lane_running = Gauge("millstream_lane_running", "Jobs that run", ("model", "lane"), registry=registry)
        self.lane_paused = Gauge(
            "millstream_lane_paused", "1 where claiming is stopped", ("model", "lane"), registry=registry
        )
        self.backlog_seconds = Gauge(
            "millstream_backlog_seconds",
            "Worker-seconds of work in the queue, estimated",
            ("model",),
            registry=registry,
        )
        self.workers = Gauge("millstream_workers", "Workers that tell of themselves", ("model",), registry=registry)

    async def text(self, outlook: Outlook) -> bytes:
        """The exposition, with the queue as it stands now."""
        for alias in await outlook.cards.all():
            facts = await outlook.facts(alias, max_age_seconds=0.0)
            for lane, load in facts.loads.items():
                for tier, waiting in load.waiting.items():
                    self.lane_depth.labels(alias, str(lane), tier).set(waiting)
                self.lane_running.labels(alias, str(lane)).set(load.running)
                self.lane_paused.labels(alias, str(lane)).set(load.paused)
            self.backlog_seconds.labels(alias).set(eta.backlog_seconds(facts))
            self.workers.labels(alias).set(len(facts.workers))
        return generate_latest(self.registry)
