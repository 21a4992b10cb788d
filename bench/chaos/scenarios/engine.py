"""The engine under faults: exact continuation with a real model, and nothing that leaks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.scenarios.ending import finish
from bench.chaos.site import Site
from bench.chaos.yard import NotHere, Yard
from engine.errors import ModelLoadError
from engine.weights import resolve

MODEL = "smollm2-135m"
REAL_ENGINE = {"num_kv_blocks": 512, "num_threads": 1, "fake_seconds_per_step": 0.0}


async def continuation(yard: Yard) -> Record:
    record = Record(promise="exact continuation", fault="SIGKILL mid-generation, real model, greedy and seeded")
    try:
        await asyncio.to_thread(resolve, MODEL)
    except ModelLoadError as error:
        raise NotHere(str(error)) from error
    count, num_kinds = yard.size(4, 200), yard.size(4, 20)
    num_tokens = yard.size(24, 40)
    async with yard.site() as site:
        await site.gateway()
        real: dict[str, Any] = {"model": MODEL, "lease_seconds": 4.0, "engine": REAL_ENGINE}
        workers = [await site.worker(**real) for _ in range(1 if yard.short else 2)]
        # Not the reference of another process: the undisturbed run is the service's own, before anything is hurt.
        undisturbed = Ledger(site.http, None)
        sampled: dict[str, Any] = {"temperature": 1.0, "presence_penalty": 0.3}
        kinds = [
            (f"Write a tale about {number} mills.", {"max_tokens": num_tokens, "ignore_eos": True}
             | (sampled | {"seed": number} if number % 2 else {"temperature": 0.0}))
            for number in range(num_kinds)
        ]  # fmt: skip
        for kind in kinds:
            await undisturbed.submit_until_accepted(*kind, model=MODEL)
        await undisturbed.settle(record, seconds=300)
        answers = [audit.tokens for audit in (undisturbed.audits[job_id] for job_id in undisturbed.told)]
        ledger = Ledger(site.http, None)
        ids: list[str] = []
        num_kills = yard.size(1, 10)
        for number in range(num_kills):
            # One kill a batch: a job that lost three workers would fail, as it should.
            batch = [
                await ledger.submit_until_accepted(*kinds[(len(ids) + offset) % num_kinds], model=MODEL)
                for offset in range(count // num_kills)
            ]
            await _until_tokens_of_all(ledger, batch[: len(workers)])
            victim = workers[number % len(workers)]
            await victim.kill()
            await victim.start()
            await asyncio.gather(*(ledger.read_log(job_id) for job_id in batch))
            ids += batch
        await finish(site, ledger, record, seconds=300)
        for number, job_id in enumerate(ids):
            same = ledger.audits[job_id].tokens == answers[number % num_kinds]
            record.demand(same, f"{job_id}: tokens differ from the undisturbed run's")
        continued = [
            audit for audit in ledger.audits.values() if audit.attempts > 1 and _tokens_before_requeue(audit.events)
        ]
        record.demand(continued, "no job was continued in the middle: the fault did not happen")
        record.figures = {"kills": num_kills, "continued mid-generation": len(continued), "model": MODEL}
    return record


def _tokens_before_requeue(events: list[dict[str, Any]]) -> bool:
    kinds = [event["type"] for event in events]
    return "job.requeued" in kinds and "job.delta" in kinds[: kinds.index("job.requeued")]


async def _until_tokens_of_all(ledger: Ledger, ids: list[str]) -> None:
    """Returns once each job has shown tokens."""
    for job_id in ids:
        async for event in ledger.follow(job_id):
            if event["type"] == "job.delta":
                break


async def leaks(yard: Yard) -> Record:
    record = Record(promise="nothing leaks", fault="mixed load: cancels, hang-ups, several choices")
    rounds, size = yard.size(3, 50), yard.size(100, 2000)
    async with yard.site() as site:
        await site.gateway()
        # Few blocks for many sequences. Workers claim what fits, so that little or nothing is preempted here.
        engine = {"num_kv_blocks": 512, "max_num_seqs": 64, "fake_seconds_per_step": 0.001, "swap_space": 0.05}
        worker = await site.worker(engine=engine)
        site_keys = await _num_keys(site)
        memory: list[int] = []
        for number in range(rounds):
            ledger = Ledger(site.http, Reference() if number == 0 else None)
            may_end = {"job.succeeded", "job.cancelled"}
            await ledger.submit_many(asks.mixed(size, max_tokens=12), may_end=may_end)
            for job in range(12):
                await ledger.submit_until_accepted(*asks.long(job, max_tokens=700), may_end=may_end)
            await _hang_up(site, 8)
            for job_id in list(ledger.told)[::9]:
                await site.http.post(f"/v1/jobs/{job_id}/cancel")
            await ledger.settle(record, seconds=120)
            await _delete_all(site)
            memory.append(_resident_kib(worker.pid))
        record.leaked_blocks += await site.leaked_blocks()
        left = await _num_keys(site) - site_keys
        record.demand(left <= 0, f"{left} keys are left of deleted jobs")
        preempted = await worker.metric("num_preemptions_total")
        grown = memory[-1] - memory[len(memory) // 2]
        record.demand(grown < 8192, f"the worker's memory grew by {grown} KiB in the second half")
        record.figures = {
            "preemptions": int(preempted),
            "KiB grown in the second half": grown,
            "keys left": max(0, left),
        }
    return record


async def _hang_up(site: Site, count: int) -> None:
    """Foreground requests whose clients leave after the first bytes."""

    async def one(number: int) -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 500}
        async with site.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                return

    await asyncio.gather(*(one(number) for number in range(count)))


async def _delete_all(site: Site) -> None:
    """Every job that has ended, and those of clients that hung up once they have."""
    for _ in range(200):
        async with site.redis() as client:
            ids = [key.decode().rpartition(":")[2] async for key in client.scan_iter("ms:{*}:job:*", count=1000)]
        if not ids:
            return
        for start in range(0, len(ids), 20):
            await asyncio.gather(*(site.http.delete(f"/v1/jobs/{job_id}") for job_id in ids[start : start + 20]))
        await asyncio.sleep(0.05)


async def _num_keys(site: Site) -> int:
    """Keys that belong to jobs: not the lanes' own, which stay, nor idempotency keys, which expire by themselves."""
    async with site.redis() as client:
        found = [key async for key in client.scan_iter("*", count=1000)]
    return sum(b":job:" in key or b":events:" in key or b":notice:" in key or b":due" in key for key in found)


def _resident_kib(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])
