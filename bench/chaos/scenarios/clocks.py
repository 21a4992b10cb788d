"""Wall clocks that are hours wrong, each process's another way: time is the store's alone."""

from __future__ import annotations

import time
from typing import Any

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.preload import preload
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.scenarios.ending import finish
from bench.chaos.scenarios.workers import SWEEP_SECONDS, until_tokens
from bench.chaos.site import LEASE_SECONDS
from bench.chaos.yard import Yard

SKEWS = {"gateway": 3600, "dispatcher": -7200, "worker": -3600, "other worker": 86400}
SHORT_SECONDS = 2.0  # of a deadline that will be missed
SLOW = {"fake_seconds_per_step": 0.02}


async def skewed(yard: Yard) -> Record:
    record = Record(promise="live lease never stolen", fault="wall clocks wrong by an hour and more, each another way")
    library = preload("skew", yard.folder)

    def wrong(process: str) -> dict[str, str]:
        return {**library, "CHAOS_SKEW_SECONDS": str(SKEWS[process])}

    async with yard.site() as site:
        site.environment = wrong("gateway")
        await site.gateway(sweep_seconds=SWEEP_SECONDS)
        site.environment = wrong("dispatcher")
        await site.dispatcher()
        site.environment = wrong("worker")
        victim = await site.worker(engine=SLOW)
        ledger = Ledger(site.http, Reference())
        limits: dict[str, Any] = {"queue_ttl": 600, "attempt_timeout": 600}
        late = await ledger.submit_until_accepted(
            *asks.long(0, max_tokens=1500), may_end={"job.expired"}, deadline=time.time() + SHORT_SECONDS, **limits
        )
        deadline = time.time() + SHORT_SECONDS
        running = [
            await ledger.submit_until_accepted(
                *asks.long(number, max_tokens=1000), deadline=time.time() + 600, **limits
            )
            for number in range(1, 5)
        ]
        await until_tokens(ledger, running[-1], 20)
        site.environment = wrong("other worker")
        await site.worker()
        for _ in range(yard.size(6, 50)):
            await ledger.submit_many(asks.mixed(10), page=10, deadline=time.time() + 600, **limits)
        requeues = sum([await ledger.attempts(job_id) - 1 for job_id in running])
        record.demand(requeues == 0, f"{requeues} live leases were taken")
        killed_at = time.time()
        await victim.kill()
        await finish(site, ledger, record, seconds=120)
        [ended] = [event["at"] for event in ledger.audits[late].events if event["type"] == "job.expired"]
        over = ended - deadline
        bound = SWEEP_SECONDS + 1.0
        record.demand(-1.0 <= over <= bound, f"a deadline passed {over:.1f} s before its job expired")
        starts = [_last_start(ledger, job_id) - killed_at for job_id in running]
        reclaimed = [seconds for seconds in starts if seconds > 0]
        record.demand(reclaimed, "no job was reclaimed: the fault did not happen")
        bound = LEASE_SECONDS + SWEEP_SECONDS
        record.demand(
            all(seconds <= bound for seconds in reclaimed), f"reclaimed after {reclaimed}, over {bound:.0f} s"
        )
        record.figures = {
            "clocks wrong by s": " ".join(map(str, SKEWS.values())),
            "reclaimed after at most s": round(max(reclaimed, default=0.0), 2),
            "expired after its deadline s": round(over, 2),
        }
    return record


def _last_start(ledger: Ledger, job_id: str) -> float:
    return max(float(event["at"]) for event in ledger.audits[job_id].events if event["type"] == "job.started")
