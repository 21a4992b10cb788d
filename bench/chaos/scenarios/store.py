"""A store that runs full, restarts, answers late or not at all."""

from __future__ import annotations

import asyncio

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.proxy import proxy
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.scenarios.ending import finish
from bench.chaos.scenarios.workers import until_tokens
from bench.chaos.yard import Yard


async def _submit_until(ledger: Ledger, over: asyncio.Event) -> None:
    """Keeps accepting while faults are injected."""
    while not over.is_set():
        await ledger.submit_many(asks.mixed(10), page=10)
        await asyncio.sleep(0.05)


async def oom(yard: Yard) -> Record:
    record = Record(promise="commits under OOM", fault="maxmemory reached while jobs run")
    async with yard.site() as site:
        await site.gateway()
        await site.worker()
        ledger = Ledger(site.http, Reference())
        count = yard.size(12, 100)
        for number in range(count):
            await ledger.submit_until_accepted(*asks.long(number, max_tokens=1500))
        await until_tokens(ledger, next(iter(ledger.told)), 10)
        async with site.redis() as client:
            used = int((await client.info("memory"))["used_memory"])
            await client.config_set("maxmemory", used // 2)  # everything is over the limit at once
            await asyncio.sleep(1.2)  # the gateway looks at the server's memory once a second
            record.demand(await site.unfinished() >= count, "the jobs had ended before memory was full")
            await ledger.submit("refused", {"max_tokens": 1})
            record.demand(ledger.answers.get(503, 0) == 1, f"a submit at full memory was answered by {ledger.answers}")
            await ledger.settle(record, seconds=120)
            losses = sum(audit.requeues.count("lease_lost") for audit in ledger.audits.values())
            record.demand(losses == 0, f"{losses} leases were lost while memory was full")
            await client.config_set("maxmemory", 0)
        await asyncio.sleep(1.2)
        await ledger.submit_until_accepted("afterwards", {"max_tokens": 2, "temperature": 0.0})
        record.jobs -= count
        await finish(site, ledger, record, seconds=60)
        record.figures = {"commits over the limit": count, "leases lost": losses, "refused with 503": 1}
    return record


async def restart(yard: Yard) -> Record:
    record = Record(promise="no accepted job lost", fault="SIGKILL the server and start it again, under load")
    async with yard.site() as site:
        await site.gateway()
        for _ in range(2):
            await site.worker()
        ledger = Ledger(site.http, Reference())
        rounds = yard.size(2, 6)
        faults_over = asyncio.Event()
        submitting = asyncio.create_task(_submit_until(ledger, faults_over))
        for _ in range(rounds):
            await asyncio.sleep(1.0)
            site.server.kill()  # its process, not its machine: what was written is in the page cache
            await asyncio.sleep(0.5)
            site.server.start()
        faults_over.set()
        await submitting
        await finish(site, ledger, record, seconds=120)
        record.figures = {"server kills": rounds, "503": ledger.answers.get(503, 0)}
    return record


async def network(yard: Yard) -> Record:
    record = Record(promise="no accepted job lost", fault="cut, delay and half-open the connections to the store")
    async with yard.site() as site, proxy(site.server.url) as (between, url):
        await site.gateway(store_url=url)
        worker = await site.worker(store_url=url, lease_seconds=8.0, renew_seconds=1.0)
        ledger = Ledger(site.http, Reference())
        faults_over = asyncio.Event()
        submitting = asyncio.create_task(_submit_until(ledger, faults_over))
        for _ in range(yard.size(2, 8)):
            await asyncio.sleep(0.7)
            between.cut()
            await asyncio.sleep(0.5)
            between.delay_seconds = 0.05
            await asyncio.sleep(0.5)
            between.delay_seconds = 0.0
        between.is_half_open = True
        await asyncio.sleep(6.0)  # longer than the connections' time-out
        between.is_half_open = False
        between.cut()
        faults_over.set()
        await submitting
        await finish(site, ledger, record, seconds=120)
        record.demand(worker.is_alive, "the worker did not survive")
        record.figures = {"cuts": between.num_cuts, "503": ledger.answers.get(503, 0)}
    return record
