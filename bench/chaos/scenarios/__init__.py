"""The scenarios by name, in the order in which they run."""

from __future__ import annotations

from bench.chaos.scenarios import (
    clients,
    clocks,
    cluster,
    continuation,
    durability,
    leaks,
    outside,
    runs,
    store,
    tenants,
    workers,
)
from bench.chaos.yard import Scenario

SCENARIOS: dict[str, Scenario] = {
    "kills": workers.kills,
    "zombie": workers.zombie,
    "recovery": workers.recovery,
    "long-step": workers.long_step,
    "hung": workers.hung,
    "drain": workers.drain,
    "poison": workers.poison,
    "streams": clients.streams,
    "ambiguous": clients.ambiguous,
    "backpressure": clients.backpressure,
    "oom": store.oom,
    "restart": store.restart,
    "network": store.network,
    "power-loss": durability.power_loss,
    "failover": durability.failover,
    "cluster": cluster.failover,
    "webhooks": outside.webhooks,
    "ssrf": outside.ssrf,
    "telemetry": outside.telemetry,
    "cache": tenants.cache,
    "run": runs.exact,
    "clocks": clocks.skewed,
    "continuation": continuation.continuation,
    "leaks": leaks.leaks,
}
