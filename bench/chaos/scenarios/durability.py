"""Power loss: what was accepted in the mode `fsync` is there afterwards."""

from __future__ import annotations

import asyncio
import time

import redis.asyncio

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.power import lose_power, sync_log_environment
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.scenarios.ending import finish
from bench.chaos.sentinels import Guarded, guarded
from bench.chaos.site import Site
from bench.chaos.yard import Yard

CLIENTS = 8


async def power_loss(yard: Yard) -> Record:
    record = Record(promise="`fsync` survives power loss", fault="cut the append-only file at the last synced byte")
    fast = Record(promise="", fault="")
    fast_ms, forgotten = await _one(yard, "fast", fast, rounds=yard.size(1, 3))
    fsync_ms, lost = await _one(yard, "fsync", record, rounds=yard.size(1, 10))
    record.lost += lost
    record.figures = {
        "acknowledged but lost": lost,
        "the same in mode fast": forgotten,
        "submit ms fsync": round(fsync_ms, 1),
        "submit ms fast": round(fast_ms, 1),
        **record.figures,
    }
    return record


async def _one(yard: Yard, mode: str, record: Record, *, rounds: int) -> tuple[float, int]:
    """Milliseconds of a submit, and how many accepted jobs the server had forgotten after the cuts."""
    folder = yard.folder / mode
    folder.mkdir()
    watched = sync_log_environment(folder)
    policy = ("appendfsync always",) if mode == "fsync" else ()
    cut_bytes = num_forgotten = 0
    seconds: list[float] = []
    async with yard.site(*policy, name=mode, environment=watched) as site:
        site.store = {"durability": mode}
        await site.gateway()
        worker = await site.worker()
        await worker.stop()  # the alias is known; the accepted jobs wait
        ledger = Ledger(site.http, Reference())
        for _ in range(rounds):
            await load(site, ledger, seconds, num_seconds=2.3)
            cut_bytes += lose_power(site.server, folder / "sync.log")
            site.server.start()
            gone = await forgotten(site, ledger)
            num_forgotten += len(gone)
            for job_id in gone:
                del ledger.told[job_id]
        await worker.start()
        await finish(site, ledger, record, seconds=120)
    record.figures["bytes cut"] = cut_bytes
    return 1000 * sum(seconds) / len(seconds), num_forgotten


async def failover(yard: Yard) -> Record:
    record = Record(promise="failover", fault="Sentinel: SIGKILL the primary under load")
    fast = Record(promise="", fault="")
    if not yard.short:
        await _failover(yard, "fast", fast)
    lost = await _failover(yard, "replicated", record)
    record.lost += lost
    record.jobs += fast.jobs
    for name in ("duplicates", "gaps", "leaked_blocks"):
        setattr(record, name, getattr(record, name) + getattr(fast, name))
    record.broken += fast.broken
    record.figures |= fast.figures
    return record


async def _failover(yard: Yard, mode: str, record: Record) -> int:
    """Accepted jobs that the new primary does not know."""
    with guarded(yard.folder / f"servers-{mode}", yard.binary) as servers:
        async with yard.site(name=mode) as site:
            site.store_url = servers.url
            site.store = {"durability": mode}
            site.server.kill()
            own, site.server = site.server, servers.primary
            try:
                await site.gateway()
                await site.dispatcher()
                for _ in range(2):
                    await site.worker()
                ledger = Ledger(site.http, Reference())
                seconds: list[float] = []
                await load(site, ledger, seconds, num_seconds=1.5)
                servers.primary.kill()
                site.server = servers.replica
                rejoining = asyncio.create_task(_rejoin(servers))
                began = time.monotonic()
                await ledger.submit_until_accepted("first after", {"max_tokens": 4, "temperature": 0.0})
                away = time.monotonic() - began
                await rejoining
                await load(site, ledger, seconds, num_seconds=1.0)
                gone = await forgotten(site, ledger)
                for job_id in gone:
                    del ledger.told[job_id]
                await finish(site, ledger, record, seconds=60)
            finally:
                site.server = own
    record.figures |= {f"lost {mode}": len(gone), f"seconds of 503 {mode}": round(away, 1)}
    return len(gone)


async def _is_primary(client: redis.asyncio.Redis) -> bool:
    try:
        return bool((await client.info("replication"))["role"] == "master")
    except redis.ConnectionError:  # a sentinel closes connections when it changes roles
        return False


async def _rejoin(servers: Guarded) -> None:
    """The old primary comes back as a replica once the new one has been named."""
    async with asyncio.timeout(30), redis.asyncio.Redis.from_url(servers.replica.url) as client:
        while not await _is_primary(client):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    servers.rejoin()


async def load(site: Site, ledger: Ledger, seconds: list[float], *, num_seconds: float) -> None:
    """Clients that submit one job after the other, until their time is up."""
    end = time.monotonic() + num_seconds

    async def client(number: int) -> None:
        for prompt, params in asks.mixed(100_000):
            began = time.monotonic()
            if began > end:
                return
            if await ledger.submit(prompt, params) is not None:
                seconds.append(time.monotonic() - began)

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


async def forgotten(site: Site, ledger: Ledger) -> list[str]:
    async with site.redis() as client:
        there = {key.decode().rpartition(":")[2] async for key in client.scan_iter("ms:{*}:job:*", count=1000)}
    return [job_id for job_id in ledger.told if job_id not in there]
