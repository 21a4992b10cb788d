"""Settings, written once: these dataclasses feed the command line, the environment (`MILLSTREAM_*`) and TOML files.

A field's name is its flag (`--lease-seconds`) and its variable (`MILLSTREAM_LEASE_SECONDS`); its comment is its help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


def _cache() -> Path:
    return Path.home() / ".cache" / "millstream"


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Where the shared state lives."""

    redis_url: str | None = (
        None  # redis[s]://, redis[s]+cluster://, redis[s]+sentinel://, unix://; None: an embedded server or localhost
    )
    blob_url: str | None = None  # file:///folder or s3://bucket/prefix for large payloads; None: a folder in the cache
    cache_dir: Path | None = None  # converted models, embedded server's data, blobs; None: ~/.cache/millstream
    durability: Literal["fast", "fsync", "replicated"] = (
        "fast"  # what 202 and outcomes wait for: nothing, disk, replicas
    )
    durability_replicas: int = 1  # replicas that must have a write where durability is replicated

    @property
    def server_url(self) -> str:
        """The server that every process but `millstream up` uses: the one named, else the one of this machine."""
        return self.redis_url or "redis://127.0.0.1:6379/0"

    @property
    def cache(self) -> Path:
        return self.cache_dir or _cache()

    @property
    def blobs(self) -> str:
        return self.blob_url or (self.cache / "blobs").absolute().as_uri()


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """How the store treats jobs. All processes of a deployment use the same values."""

    record_seconds: float = 7 * 86400.0  # records and results stay so long after the end
    event_log_seconds: float = 3600.0  # event logs stay so long after the end, then 410
    dead_letter_seconds: float = 30 * 86400.0  # jobs that lost three workers stay so long
    idempotency_seconds: float = 86400.0  # idempotency keys
    patience_seconds: float = 30.0  # a tier's head that stood so long (times 2, 8 for standard, bulk) goes first


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    host: str = "127.0.0.1"  # anything but loopback is refused as long as no API key exists
    port: int = 8080
    max_body_bytes: int = 8 * 1024 * 1024
    max_queue_length: int = 100_000  # waiting jobs per lane; beyond it submits get 429
    event_page: int = 512  # events read at once for one stream
    keepalive_seconds: float = 15.0  # comment line on silent event streams
    shutdown_seconds: float = 10.0
    api_keys: str = ""  # comma-separated; each is a tenant of its own. Empty: only this machine is served
    admin_keys: str = ""  # comma-separated; they may pause and resume lanes. Empty: only this machine may
    cache_secret: str = ""  # keys the tenants' prefix-cache domains; empty: derived from the API keys
    default_max_tokens: int = 1024  # tokens generated at most where the caller does not say
    sweep_seconds: float = 30.0  # how often each gateway ends what is past its time
    watch_seconds: float = 60.0  # jobs whose clients wait are cancelled when their gateway is silent for so long
    scale_seconds_per_worker: float = 30.0  # predicted work that one worker is wanted for (/internal/scale)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: is {self.port}; give one from 1 to 65535, or 0 for any that is free")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    model: str = "smollm2-135m"  # alias, local folder, hub id, s3:// URL, or `fake` for the deterministic stand-in
    alias: str | None = None  # public name; None: the model's own
    lease_seconds: float = 30.0
    renew_seconds: float = 8.0
    stall_seconds: float = 180.0  # no finished step for so long: renewals stop and another worker takes over
    drain_seconds: float = 30.0  # on SIGTERM: finish what fits, hand the rest over
    flush_seconds: float = 0.02  # tokens of so long are published together
    metrics_port: int = 0  # 0: none
    max_workers: int = 0  # workers that this model's pool may come to: what deadlines are judged by. 0: as many as run
    cold_start_seconds: float = 0.0  # what a new worker needs before its process starts: a machine, an image

    def __post_init__(self) -> None:
        if self.lease_seconds <= 0:
            raise ValueError(f"lease_seconds: is {self.lease_seconds:g}; give more than 0")
        if not 0 < self.renew_seconds < self.lease_seconds:
            raise ValueError(
                f"renew_seconds: is {self.renew_seconds:g}; give more than 0 and less than lease_seconds "
                f"({self.lease_seconds:g})"
            )


@dataclass(frozen=True, kw_only=True)
class DispatcherSettings:
    webhook_allow: str = ""  # comma-separated hosts or networks that webhooks may reach although they are private
    webhook_secret: str | None = None  # whsec_...; None: one is made once and kept in the store
    webhook_timeout_seconds: float = 15.0
    webhook_concurrency: int = 64
    webhook_schedule: str = "0,5,300,1800,7200,18000,36000,36000"  # seconds before each try
    sweep_seconds: float = 30.0
    notice_hide_seconds: float = 60.0  # a notice whose relay died returns after so long
    public_url: str = ""  # the gateway as clients reach it, put before the paths in webhooks: https://llm.example.com
    celery_url: str | None = None  # broker of the steps of runs, no Cluster; None: the store's server
    dispatcher_health_port: int = 0  # /healthz and /readyz; 0: none


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    celery_url: str | None = None  # broker of the steps, no Cluster; None: the store's server
    run_window: int = 16  # child jobs of one run in the queue at once
    file_roots: str = ""  # colon-separated folders that file:// inputs may name; empty: none
    s3_roots: str = ""  # comma-separated s3://bucket/prefix that s3:// inputs may name; empty: none
    pipelines_health_port: int = 0  # /healthz and /readyz; 0: none
