"""Nothing leaks: not a block, not a key, not a byte, over very many jobs of every sort."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.pipeline import ask_many
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.site import Site
from bench.chaos.yard import Yard

MAY_END = frozenset({"job.succeeded", "job.cancelled"})
NUM_LONG, NUM_HANG_UPS = 12, 8
# More tokens than a worker has room for: it is claimed when nothing else runs, and its choices preempt each other.
PREEMPTING = ("preempting", {"n": 8, "max_tokens": 1200, "temperature": 1.0, "seed": 1})


async def leaks(yard: Yard) -> Record:
    record = Record(
        promise="nothing leaks",
        fault="mixed load: cancels, hang-ups, several choices, preemption",
    )
    rounds, size = yard.size(3, 25), yard.size(100, 4000)
    async with yard.site() as site:
        await site.gateway()
        engine = {"num_kv_blocks": 512, "max_num_seqs": 64, "fake_seconds_per_step": 0.0005, "swap_space": 0.05}
        worker = await site.worker(engine=engine)
        keys_before = await _num_keys(site)
        memory: list[int] = []
        for number in range(rounds):
            if number == 0:
                await _audited(site, record, size // 10)
            await _round(site, record, size)
            memory.append(_resident_kib(worker.pid))
        record.leaked_blocks += await site.leaked_blocks()
        left = await _num_keys(site) - keys_before
        record.demand(left <= 0, f"{left} keys are left of deleted jobs")
        preempted = int(await worker.metric("num_preemptions_total"))
        record.demand(preempted, "nothing was preempted: the load was too light")
        grown = memory[-1] - memory[len(memory) // 2]
        record.demand(grown < 8192, f"the worker's memory grew by {grown} KiB in the second half")
        record.demand(await site.unfinished() == 0, "the server still counts unfinished jobs")
        record.figures = {
            "preemptions": preempted,
            "KiB grown in the second half": grown,
            "keys left": max(0, left),
        }
    return record


async def _audited(site: Site, record: Record, size: int) -> None:
    """A few, read event by event and compared with what undisturbed runs give."""
    ledger = Ledger(site.http, Reference())
    await ledger.submit_many(asks.mixed(size, max_tokens=12))
    await ledger.settle(record, seconds=120)
    await _delete_all(site)


async def _round(site: Site, record: Record, size: int) -> None:
    """Very many, of which only the end is asked for."""
    ledger = Ledger(site.http, None)
    await ledger.submit_many(asks.mixed(size, max_tokens=4), may_end=MAY_END)
    for number in range(NUM_LONG):
        await ledger.submit_until_accepted(*asks.long(number, max_tokens=700), may_end=MAY_END)
    await ledger.submit_until_accepted(*PREEMPTING, may_end=MAY_END)
    await _hang_up(site, NUM_HANG_UPS)
    cancelled = [f"/v1/jobs/{job_id}/cancel" for job_id in list(ledger.told)[-NUM_LONG - size // 10 : -1 : 5]]
    await ask_many(str(site.http.base_url), "POST", cancelled)
    async with asyncio.timeout(300):
        while await site.unfinished():  # noqa: ASYNC110
            await asyncio.sleep(0.25)  # a look goes through all keys
    ends = await _ends(site)
    record.jobs += len(ends)
    record.lost += sum(f"job.{ends.get(job_id)}" not in MAY_END for job_id in ledger.told)
    record.demand(len(ends) == len(ledger.told) + NUM_HANG_UPS, f"{len(ends)} jobs of {len(ledger.told)} accepted ones")
    await _delete_all(site, list(ends))


async def _ends(site: Site) -> dict[str, str]:
    """The status of every job that the caller has, page by page."""
    found: dict[str, str] = {}
    after: dict[str, str] = {}
    while True:
        page = (await site.http.get("/v1/jobs", params={"limit": 100, **after})).json()
        found |= {job["id"]: job["status"] for job in page["data"]}
        if not page["has_more"]:
            return found
        after = {"after": page["last_id"]}


async def _hang_up(site: Site, count: int) -> None:
    """Foreground requests whose clients leave after the first bytes."""

    async def one(number: int) -> None:
        body: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": f"{number}"}]}
        body |= {"max_tokens": 500, "stream": True}
        async with site.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                return

    await asyncio.gather(*(one(number) for number in range(count)))


async def _delete_all(site: Site, ids: list[str] | None = None) -> None:
    paths = [f"/v1/jobs/{job_id}" for job_id in (ids if ids is not None else await _ends(site))]
    await asyncio.gather(*(ask_many(str(site.http.base_url), "DELETE", paths[part::4]) for part in range(4)))


async def _num_keys(site: Site) -> int:
    """Keys that belong to jobs: not the lanes' own, which stay, nor idempotency keys, which expire by themselves."""
    async with site.redis() as client:
        found = [key async for key in client.scan_iter("*", count=1000)]
    return sum(any(part in key for part in (b":job:", b":events:", b":notice:", b":due")) for key in found)


def _resident_kib(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])
