"""A Cluster of six: a primary dies under load, and its replica takes its slots."""

from __future__ import annotations

import asyncio
import time

from bench.chaos import asks
from bench.chaos.clusters import Clustered, clustered
from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.scenarios.durability import forgotten, load
from bench.chaos.scenarios.ending import finish
from bench.chaos.yard import Yard
from infra.cluster import slot_of
from infra.jobs import RedisJobs
from infra.keys import Lane, lane_of

NUM_LANES = 3  # of the one alias: in slots of two primaries
AWAY_SECONDS = 30.0


async def failover(yard: Yard) -> Record:
    record = Record(promise="failover", fault="6-node Cluster, 3 lanes: SIGKILL a primary under load")
    for mode in ("replicated",) if yard.short else ("replicated", "fast"):
        lost = await _failover(yard, mode, record)
        if mode == "replicated":
            record.lost += lost
    return record


async def _failover(yard: Yard, mode: str, record: Record) -> int:
    """Accepted jobs that the new primary does not know."""
    with clustered(yard.folder / f"servers-{mode}", yard.binary, num_replicas=1) as cluster:
        async with yard.site(name=mode) as site:  # its own server is the steps' broker
            site.cluster, site.store_url, site.store = cluster, cluster.url, {"durability": mode}
            await site.gateway()
            await site.dispatcher(celery_url=site.server.url)
            for _ in range(2):
                await site.worker()
            lanes = await _add_lanes(cluster)
            victim = cluster.holder(slot_of(Lane(lanes[0]).state))
            held = [lane for lane in lanes if cluster.holder(slot_of(Lane(lane).state)) is victim]
            record.demand(0 < len(held) < NUM_LANES, f"lanes {held} of {lanes} are on one server")
            ledger = Ledger(site.http, Reference())
            seconds: list[float] = []
            loading = asyncio.create_task(load(site, ledger, seconds, num_seconds=3.0))
            await asyncio.sleep(1.5)
            victim.kill()
            began = time.monotonic()
            rejoining = asyncio.create_task(_rejoin(cluster, held[0], victim.url))
            away = await _until_accepted(ledger, held, began)
            await loading
            await rejoining
            await load(site, ledger, seconds, num_seconds=1.0)
            gone = await forgotten(site, ledger)
            for job_id in gone:
                del ledger.told[job_id]
            await finish(site, ledger, record, seconds=60)
    record.figures |= {f"lost {mode}": len(gone), f"seconds of 503 {mode}": round(away, 1)}
    return len(gone)


async def _add_lanes(cluster: Clustered) -> list[int]:
    """As `millstream lanes add` does, and time for everybody to hear of them."""
    store = await RedisJobs.connect(cluster.url)
    for _ in range(NUM_LANES - 1):
        await store.add_lane("fake")
    lanes = await store.lanes("fake")
    await store.close()
    await asyncio.sleep(2.5)
    return lanes


async def _rejoin(cluster: Clustered, lane: int, old_url: str) -> None:
    """The old primary comes back, and follows the one that has its slots."""
    async with asyncio.timeout(AWAY_SECONDS):
        while (await asyncio.to_thread(cluster.holder, slot_of(Lane(lane).state))).url == old_url:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    old = next(server for server in cluster.servers if server.url == old_url)
    await asyncio.to_thread(old.start)


async def _until_accepted(ledger: Ledger, lanes: list[int], began: float) -> float:
    """Seconds until a lane of the server that died takes a job again."""
    async with asyncio.timeout(AWAY_SECONDS):
        for prompt, params in asks.mixed(100_000):
            job_id = await ledger.submit(prompt, params)
            if job_id is not None and lane_of(job_id) in lanes:
                break
            await asyncio.sleep(0.02)
    return time.monotonic() - began
