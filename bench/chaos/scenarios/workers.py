"""Workers that die, sleep, hang, drain, or are killed by what they run."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.process import ChaosFailed, Process
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.scenarios.ending import finish
from bench.chaos.site import LEASE_SECONDS, Worker
from bench.chaos.yard import Yard

SWEEP_SECONDS = 1.0


async def until_tokens(ledger: Ledger, job_id: str, count: int) -> None:
    """Returns once the job's stream has shown `count` tokens."""
    seen = 0
    async for event in ledger.follow(job_id):
        seen += sum(len(delta.get("token_ids", ())) for delta in event.get("deltas", ()))
        if seen >= count:
            return


async def kills(yard: Yard) -> Record:
    record = Record(promise="no accepted job lost", fault="SIGKILL random workers and the gateway")
    chance = random.Random(11)
    async with yard.site() as site:
        gateway = await site.gateway()
        await site.dispatcher()
        workers = [await site.worker(engine={"fake_seconds_per_step": 0.002}) for _ in range(2)]
        ledger = Ledger(site.http, Reference())
        num_kills = 0

        async def keep_killing() -> None:
            nonlocal num_kills
            while True:
                await asyncio.sleep(chance.uniform(0.5, 1.5))
                victim: Process = gateway if num_kills % 3 == 1 else chance.choice(workers)
                await victim.kill()
                num_kills += 1
                await victim.start()

        killing = asyncio.create_task(keep_killing())
        try:
            # The long ones sit in several of the workers that are killed; none of them may be taken for their killer.
            await ledger.submit_many((asks.long(number) for number in range(yard.size(4, 100))), page=100)
            await ledger.submit_many(asks.mixed(yard.size(300, 10_000)), page=100)
            while num_kills < yard.size(3, 20):
                if killing.done():
                    killing.result()
                await ledger.submit_many(asks.mixed(20), page=20)
                await asyncio.sleep(0.25)
        finally:
            killing.cancel()
            await asyncio.wait([killing])
        for process in (gateway, *workers):
            if not process.is_alive:
                await process.start()
        await finish(site, ledger, record, seconds=yard.size(60, 600))
        record.figures = {
            "kills": num_kills,
            "attempts": sum(audit.attempts for audit in ledger.audits.values()),
            "most attempts of a job": max(audit.attempts for audit in ledger.audits.values()),
            "requests without answer": ledger.answers.get(0, 0),
        }
    return record


async def zombie(yard: Yard) -> Record:
    record = Record(promise="one visible outcome", fault="SIGSTOP a worker past its lease, then SIGCONT")
    num_fenced = 0.0
    async with yard.site() as site:
        await site.gateway()
        sleeper = await site.worker()
        ledger = Ledger(site.http, Reference())
        for round_number in range(yard.size(1, 5)):
            ids = [
                await ledger.submit_until_accepted(*asks.long(100 * round_number + number))
                for number in range(yard.size(4, 12))
            ]
            await until_tokens(ledger, ids[-1], 20)
            sleeper.send(signal.SIGSTOP)
            other = await site.worker()
            await asyncio.sleep(LEASE_SECONDS + 0.5)
            while not any([await ledger.attempts(job_id) > 1 for job_id in ids]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            sleeper.send(signal.SIGCONT)
            await ledger.settle(record, seconds=60)
            num_fenced += await sleeper.metric("fenced_writes_total")
            ledger.told.clear()
            await sleeper.stop()
            sleeper = other
        record.leaked_blocks += await site.leaked_blocks()
        record.demand(num_fenced > 0, "no write of the sleeper was fenced: the fault did not happen")
        record.figures = {"fenced writes": int(num_fenced), "duplicate outcomes": record.duplicates}
    return record


async def recovery(yard: Yard) -> Record:
    record = Record(promise="bounded recovery", fault="SIGKILL, from the kill to the next attempt")
    waits: list[float] = []
    slow = {"fake_seconds_per_step": 0.02}  # so that no job ends before its worker is killed
    async with yard.site() as site:
        await site.gateway()
        await site.worker(engine=slow)
        ledger = Ledger(site.http, Reference())
        for round_number in range(yard.size(2, 10)):
            ids = [
                await ledger.submit_until_accepted(*asks.long(100 * round_number + number, max_tokens=300))
                for number in range(6)
            ]
            await until_tokens(ledger, ids[-1], 10)
            [victim] = site.workers
            await site.worker(engine=slow)
            killed_at = time.time()
            await victim.kill()
            await ledger.settle(record, seconds=60)
            for job_id in ids:
                starts = [e["at"] for e in ledger.audits[job_id].events if e["type"] == "job.started"]
                waits += [start - killed_at for start in starts[1:] if start > killed_at]
            ledger.told.clear()
        record.leaked_blocks += await site.leaked_blocks()
        waits.sort()
        bound = LEASE_SECONDS + SWEEP_SECONDS
        record.demand(waits, "no job was reclaimed: the fault did not happen")
        if waits:
            p99 = waits[min(len(waits) - 1, round(0.99 * (len(waits) - 1)))]
            record.demand(p99 <= bound, f"p99 of kill -> reclaimed is {p99:.2f} s, over {bound:.1f} s")
            record.figures = {"reclaimed": len(waits), "p99 s": round(p99, 2), "bound s": bound}
    return record


async def long_step(yard: Yard) -> Record:
    record = Record(promise="live lease never stolen", fault="one step of the engine longer than many leases")
    step_seconds = 60.0 if not yard.short else 2 * LEASE_SECONDS
    async with yard.site() as site:
        await site.gateway()
        slow = await site.worker(engine={"fake_seconds_per_step": step_seconds})
        ledger = Ledger(site.http, Reference())
        ids = [await ledger.submit_until_accepted(f"{n} slow", {"max_tokens": 1, "temperature": 0.0}) for n in range(3)]
        while await ledger.attempts(ids[-1]) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await site.worker()
        await finish(site, ledger, record, seconds=4 * step_seconds + 30)
        false_reclaims = sum(audit.attempts - 1 for audit in ledger.audits.values())
        record.demand(false_reclaims == 0, f"{false_reclaims} live leases were taken")
        record.demand(await slow.metric("jobs_total") == len(ids), "the slow worker did not run the jobs itself")
        record.figures = {"step s": step_seconds, "lease s": LEASE_SECONDS, "false reclaims": false_reclaims}
    return record


async def hung(yard: Yard) -> Record:
    record = Record(promise="hung engine", fault="the engine's thread stops stepping")
    stall_seconds = 3.0 if yard.short else 180.0
    async with yard.site() as site:
        await site.gateway()
        stuck = await site.worker(stall_seconds=stall_seconds, engine={"fake_seconds_per_step": 3600.0})
        ledger = Ledger(site.http, Reference())
        job_id = await ledger.submit_until_accepted(*asks.long(1, max_tokens=40))
        while await ledger.attempts(job_id) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await site.worker()
        await ledger.settle(record, seconds=stall_seconds + 60)
        starts = [event["at"] for event in ledger.audits[job_id].events if event["type"] == "job.started"]
        elsewhere_seconds = starts[-1] - starts[0]
        record.demand(len(starts) == 2, f"{len(starts)} attempts instead of 2")
        bound = stall_seconds + LEASE_SECONDS + SWEEP_SECONDS + 1.0  # the keeper looks once a renewal
        record.demand(stall_seconds <= elsewhere_seconds <= bound, f"continued after {elsewhere_seconds:.1f} s")
        stuck.end()
        record.leaked_blocks += await site.leaked_blocks()
        record.figures = {"stall s": stall_seconds, "continued after s": round(elsewhere_seconds, 2)}
    return record


async def drain(yard: Yard) -> Record:
    record = Record(promise="drain loses nothing", fault="SIGTERM under load; rolling restart of all workers")
    drain_seconds, grace_seconds = 0.5, 0.5 + 15.0
    num_generated, longest = 0, 0.0
    async with yard.site() as site:
        await site.gateway()
        slow = {"fake_seconds_per_step": 0.02}
        workers = [await site.worker(drain_seconds=drain_seconds, engine=slow) for _ in range(2)]
        ledger = Ledger(site.http, Reference())
        for _ in range(yard.size(1, 4)):
            for old in list(workers):
                workers.append(await site.worker(drain_seconds=drain_seconds, engine=slow))
                load = (asks.long(number, max_tokens=250) for number in range(yard.size(25, 30)))
                await ledger.submit_many(load)
                await until_tokens(ledger, next(reversed(ledger.told)), 10)
                began = time.monotonic()
                old.send(signal.SIGTERM)
                record.demand(await old.ended() == 0, "a drained worker did not exit with 0")
                longest = max(longest, time.monotonic() - began)
                num_generated += _num_generated(old)
                workers.remove(old)
        await finish(site, ledger, record, seconds=120)
        for worker in workers:
            await worker.stop()
            num_generated += _num_generated(worker)
        num_visible = sum(len(choice) for audit in ledger.audits.values() for choice in audit.tokens)
        num_handed_over = sum(audit.requeues.count("hand_over") for audit in ledger.audits.values())
        reasons = {reason for audit in ledger.audits.values() for reason in audit.requeues}
        record.demand(reasons <= {"hand_over"}, f"jobs were requeued for {reasons}")
        record.demand(num_handed_over, "nothing was handed over: the fault did not happen")
        record.demand(num_generated == num_visible, f"{num_generated - num_visible} tokens were generated twice")
        record.demand(longest <= grace_seconds, f"a drain took {longest:.1f} s of {grace_seconds:.0f} s")
        record.figures = {
            "handed over": num_handed_over,
            "tokens generated": num_generated,
            "tokens in results": num_visible,
            "longest drain s": round(longest, 2),
            "grace s": grace_seconds,
        }
    return record


def _num_generated(drained: Worker) -> int:
    """Tokens that a worker generated until its end, as it says then."""
    said = re.search(r"drained: (\d+) tokens were generated here", drained.output)
    if said is None:
        raise ChaosFailed("a drained worker did not say how many tokens it had generated")
    return int(said[1])


async def poison(yard: Yard) -> Record:
    record = Record(promise="poison contained", fault="a prompt that kills its worker each time, among good ones")
    async with yard.site() as site:
        await site.gateway()
        await site.dispatcher()
        ledger = Ledger(site.http, Reference())
        engine = {"fake_poison": "poison"}
        workers = [await site.worker(engine=engine) for _ in range(2)]
        bad = [
            await ledger.submit_until_accepted(
                f"{n} poisonous poison", {"max_tokens": 8, "temperature": 0.0}, may_end={"job.failed"}
            )
            for n in range(yard.size(1, 3))
        ]
        for number in range(yard.size(20, 100)):
            await ledger.submit_until_accepted(*asks.long(number, max_tokens=60))

        async def keep_alive() -> None:
            while True:
                for worker in workers:
                    if not worker.is_alive:
                        await worker.start()
                await asyncio.sleep(0.1)

        keeping = asyncio.create_task(keep_alive())
        try:
            await finish(site, ledger, record, seconds=120)
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
        neighbours = [audit for job_id, audit in ledger.audits.items() if job_id not in bad]
        worst = max(audit.requeues.count("lease_lost") for audit in neighbours)
        for job_id in bad:
            view = (await site.http.get(f"/v1/jobs/{job_id}")).json()
            code = (view["error"] or {}).get("code")
            record.demand(code == "worker_lost", f"{job_id} ended with {code}")
            attempts = ledger.audits[job_id].attempts
            record.demand(attempts == 3, f"{job_id} had {attempts} attempts instead of 3")
        async with site.redis() as client:
            dead = [len(await client.zrange(key, 0, -1)) async for key in client.scan_iter("ms:{*}:dead")]
        record.demand(sum(dead) == len(bad), f"{sum(dead)} dead letters instead of {len(bad)}")
        record.figures = {"poisonous": len(bad), "dead letters": sum(dead), "most losses of a neighbour": worst}
    return record
