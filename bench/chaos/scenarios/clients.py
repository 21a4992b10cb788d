"""Clients whose connections break, who repeat themselves, or who ask for too much."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from bench.chaos import asks
from bench.chaos.ledger import TERMINAL, Audit, Ledger
from bench.chaos.proxy import proxy
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.scenarios.ending import finish
from bench.chaos.yard import Yard


async def streams(yard: Yard) -> Record:
    record = Record(promise="stream resumes", fault="cut the SSE connection at random bytes, reconnect")
    chance = random.Random(3)
    async with yard.site() as site:
        await site.gateway()
        await site.worker()
        ledger, reference = Ledger(site.http, Reference()), Reference()
        async with proxy(str(site.http.base_url)) as (cutter, url):
            cutter.bytes_until_cut = lambda: chance.randrange(400, 6000)
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
                clients = Ledger(http, reference)

                async def one(number: int) -> None:
                    prompt, params = asks.long(number, max_tokens=150)
                    job_id = await ledger.submit_until_accepted(prompt, params)
                    audit = await _read_through_cuts(clients, job_id)
                    numbers = audit.numbers
                    record.duplicates += len(numbers) - len(set(numbers))
                    record.gaps += max(numbers) + 1 - len(set(numbers))
                    is_same = audit.tokens == reference.tokens(prompt, params)
                    record.demand(is_same, f"{job_id}: the stream's tokens are not those of its job")

                async with asyncio.TaskGroup() as group:
                    for number in range(yard.size(16, 100)):
                        group.create_task(one(number))
        record.demand(cutter.num_cuts > 0, "no connection was cut: the fault did not happen")
        record.figures = {"cuts": cutter.num_cuts}
        await finish(site, ledger, record, seconds=60)
    return record


async def _read_through_cuts(clients: Ledger, job_id: str) -> Audit:
    """All events; after each cut, those behind the last one that came whole."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in TERMINAL:
        try:
            async for event in clients.follow(job_id, starting_after=events[-1]["sequence_number"] if events else -1):
                events.append(event)
        except (httpx.TransportError, ValueError):  # ValueError: a line that was cut in two
            pass
    return Audit(job_id, events)


async def ambiguous(yard: Yard) -> Record:
    record = Record(promise="ambiguous submit", fault="drop the reply after the write; 50 clients, one key")
    num_jobs = 0
    async with yard.site() as site, proxy(site.server.url) as (dropper, url):
        await site.worker()
        await site.gateway(store_url=url)
        ledger = Ledger(site.http, Reference())
        rounds = yard.size(3, 20)
        for number in range(rounds):
            prompt, params = asks.long(number, max_tokens=12)
            marker = f"drop-me-{number}"
            dropper.drop_reply_to = marker.encode()  # only the write of the job carries its metadata
            fields = {"metadata": {"marker": marker}, "headers": {"idempotency-key": f"one key {number}"}}

            async def client(
                fields: dict[str, Any] = fields, ask: tuple[str, dict[str, Any]] = (prompt, params)
            ) -> str:
                while True:
                    job_id = await ledger.submit(*ask, **fields)
                    if job_id is not None:
                        return job_id
                    await asyncio.sleep(0.05)

            ids = await asyncio.gather(*(client() for _ in range(50)))
            num_jobs += len(set(ids))
            record.demand(dropper.drop_reply_to is None, "no reply was dropped: the fault did not happen")
        async with site.redis() as store:
            num_records = len([key async for key in store.scan_iter("ms:{*}:job:*")])
        record.duplicates += num_records - rounds
        record.demand(num_jobs == rounds, f"clients were told of {num_jobs} jobs under {rounds} keys")
        record.figures = {"keys": rounds, "requests": sum(ledger.answers.values()), "jobs in the store": num_records}
        await finish(site, ledger, record, seconds=60)
    return record


async def backpressure(yard: Yard) -> Record:
    record = Record(promise="backpressure", fault="ten times as many submits as the queue takes")
    capacity = yard.size(60, 500)
    async with yard.site() as site:
        await site.gateway(max_queue_length=capacity)
        worker = await site.worker()
        ledger = Ledger(site.http, Reference())
        [lane] = [1]
        await site.http.post(f"/internal/lanes/{lane}/pause")
        retry_afters: list[str] = []

        async def ask(prompt: str, params: dict[str, Any]) -> None:
            body = {"model": "fake", "input": prompt, "params": params}
            answer = await site.http.post("/v1/jobs", json=body)
            ledger.answers[answer.status_code] = ledger.answers.get(answer.status_code, 0) + 1
            if answer.status_code == 202:
                ledger.note(answer.json()["id"], prompt, params, ["job.succeeded"])
            elif answer.status_code == 429:
                retry_afters.append(answer.headers.get("retry-after", ""))

        used = []
        for _ in range(10):
            await asyncio.gather(*(ask(*one) for one in asks.mixed(capacity)))
            async with site.redis() as client:
                used.append(int((await client.info("memory"))["used_memory"]))
        await site.http.post(f"/internal/lanes/{lane}/resume")
        record.demand(set(ledger.answers) == {202, 429}, f"answers were {ledger.answers}")
        record.demand(len(ledger.told) == capacity, f"{len(ledger.told)} jobs were accepted, {capacity} fit")
        are_whole = all(value.isdigit() and int(value) >= 1 for value in retry_afters)
        record.demand(are_whole and retry_afters, "a 429 without a Retry-After in whole seconds")
        grown = used[-1] - used[0]
        record.demand(grown < 1 << 20, f"refused submits grew the store by {grown} bytes")
        await finish(site, ledger, record, seconds=120)
        record.demand(worker.is_alive, "the worker did not survive")
        record.figures = {"accepted": len(ledger.told), "429": len(retry_afters), "bytes grown by refusals": grown}
    return record
