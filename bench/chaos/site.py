"""A deployment to hurt: one server, and the processes that a scenario asks for."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import redis.asyncio

from bench.chaos.process import ChaosFailed, Process
from engine.config import EngineConfig
from infra.embedded import EmbeddedServer
from infra.ports import free_port
from infra.settings import DispatcherSettings, GatewaySettings, PipelineSettings, StoreSettings, WorkerSettings
from millstream.environment import environment_of

if TYPE_CHECKING:
    from bench.chaos.clusters import Clustered

P = TypeVar("P", bound=Process)

LEASE_SECONDS = 2.0
WEBHOOK_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
IDLE_SECONDS = 30.0

WORKER: dict[str, Any] = {"model": "fake", "lease_seconds": LEASE_SECONDS, "renew_seconds": 0.4, "drain_seconds": 10.0}
ENGINE: dict[str, Any] = {"num_kv_blocks": 512, "max_num_seqs": 16, "fake_seconds_per_step": 0.004}
DISPATCHER: dict[str, Any] = {
    "webhook_secret": WEBHOOK_SECRET,
    "webhook_schedule": "0,0.2,0.2,0.2,0.2",
    "webhook_timeout_seconds": 1.0,
    "notice_hide_seconds": 4.0,
    "sweep_seconds": 1.0,
}


class Worker(Process):
    """A worker whose metrics can be read."""

    def __init__(self, environment: dict[str, str], log_path: Path, metrics_port: int) -> None:
        super().__init__("worker", environment, log_path)
        self.metrics_port = metrics_port

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 where it says nothing of it."""
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://127.0.0.1:{self.metrics_port}/metrics")).text
        values = re.findall(rf"^millstream_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in values)


class Site:
    """Made by `site`. `store_url` is where its processes find the server: a proxy may stand before it."""

    def __init__(self, folder: Path, server: EmbeddedServer, http: httpx.AsyncClient, *, short: bool) -> None:
        self.folder = folder
        self.server = server
        self.store_url = server.url
        self.http = http  # to the gateway
        self.short = short
        self.processes: list[Process] = []
        self.cluster: Clustered | None = None  # where the jobs are in one instead
        self.store: dict[str, Any] = {}  # more settings of the store
        self.environment: dict[str, str] = {}  # more variables of the processes

    @property
    def workers(self) -> list[Worker]:
        """Those that live."""
        return [one for one in self.processes if isinstance(one, Worker) and one.is_alive]

    @property
    def output(self) -> str:
        """All that was ever printed."""
        return "".join(process.output for process in self.processes)

    def _environment(self, *settings: object, store_url: str | None = None) -> dict[str, str]:
        store = StoreSettings(
            redis_url=store_url or self.store_url, blob_url=(self.folder / "blobs").absolute().as_uri(), **self.store
        )
        return environment_of(store, *settings, base={**os.environ, **self.environment})

    async def _started(self, process: P) -> P:
        self.processes.append(process)
        await process.start()
        return process

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name}-{len(self.processes)}.log"

    async def gateway(self, *, store_url: str | None = None, **settings: Any) -> Process:
        port = free_port()
        environment = self._environment(GatewaySettings(port=port, **settings), store_url=store_url)
        process = await self._started(Process("gateway", environment, self._log_path("gateway")))
        self.http.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        return process

    async def worker(self, *, engine: dict[str, Any] | None = None, store_url: str | None = None,
                     **settings: Any) -> Worker:  # fmt: skip
        port = free_port()
        worker = WorkerSettings(**{**WORKER, "metrics_port": port, **settings})
        environment = self._environment(worker, EngineConfig(**{**ENGINE, **(engine or {})}), store_url=store_url)
        return await self._started(Worker(environment, self._log_path("worker"), port))

    async def dispatcher(self, **settings: Any) -> Process:
        environment = self._environment(DispatcherSettings(**{**DISPATCHER, **settings}))
        return await self._started(Process("dispatcher", environment, self._log_path("dispatcher")))

    async def pipelines(self, **settings: Any) -> Process:
        environment = self._environment(PipelineSettings(**settings))
        return await self._started(Process("pipelines", environment, self._log_path("pipelines")))

    @asynccontextmanager
    async def redis(self) -> AsyncIterator[redis.asyncio.Redis]:
        """The harness's own look at the server, or at all of the Cluster."""
        made: Any = redis.asyncio.Redis if self.cluster is None else redis.asyncio.RedisCluster
        server = self.server if self.cluster is None else self.cluster.servers[-1]
        async with made.from_url(server.url) as client:
            yield client

    async def leaked_blocks(self) -> int:
        """KV blocks that workers hold although nothing runs, after they had time to let go."""
        return sum([await self._held_when_idle(worker) for worker in self.workers])

    async def _held_when_idle(self, worker: Worker) -> int:
        """Of one worker, which may be just starting."""
        num_held: int | None = None
        for _ in range(round(IDLE_SECONDS / 0.1)):
            try:
                num_held = round(await worker.metric("kv_cache_usage_perc") * ENGINE["num_kv_blocks"])
            except httpx.ConnectError:
                num_held = None
            if num_held == 0:
                return 0
            await asyncio.sleep(0.1)
        if num_held is None:
            raise ChaosFailed("a worker that lives does not show its metrics")
        return num_held

    async def unfinished(self) -> int:
        """Jobs that the server counts as not ended: entries of streams, members of due clocks."""
        async with self.redis() as client:
            count = 0
            async for key in client.scan_iter("ms:{*}:stream:*", count=1000):
                count += await client.xlen(key)
            async for key in client.scan_iter("ms:{*}:due", count=1000):
                count += await client.zcard(key)
            return count

    def end(self) -> None:
        for process in self.processes:
            process.end()


@asynccontextmanager
async def site(
    folder: Path,
    binary: Path,
    *,
    short: bool,
    directives: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Site]:
    """A server, and whatever is started in the block; nothing of it is left afterwards."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    server = EmbeddedServer(folder / "server", binary=binary, directives=directives, environment=environment)
    server.start()
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
    try:
        async with httpx.AsyncClient(timeout=60.0, limits=limits, trust_env=False) as http:
            made = Site(folder, server, http, short=short)
            try:
                yield made
            finally:
                made.end()
    finally:
        server.kill()
