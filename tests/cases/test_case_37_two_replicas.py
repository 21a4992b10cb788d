"""llm-d-async #130 and #404, batch-gateway #644: two replicas and hard kills, and results are lost, doubled or swapped.

Kind: two of everything, equal names of the callers' own, and kills in the middle. Every result is there once, in its
own run; nothing of one run shows in another.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.site import Site
from tests.cases.deployment import deployed, end_of_run, output_rows, submit_run, times_fed

NUM_DOCUMENTS = 8
SLOW = {"fake_seconds_per_step": 0.005}


def documents(of: str) -> list[dict[str, Any]]:
    """The same ids and names in every run, other texts."""
    return [
        {"id": f"doc-{number}", "name": "one name for all",
         "text": " ".join(f"{of}{number}x{position}" for position in range(120))}
        for number in range(NUM_DOCUMENTS)
    ]  # fmt: skip


async def rows_of(site: Site, run_id: str) -> list[tuple[Any, ...]]:
    run = await end_of_run(site, run_id)
    assert run["status"] == "succeeded", run
    rows = await output_rows(site, run_id)
    return [(row["id"], row["status"], row["summary"], [chunk["summary"] for chunk in row["chunks"]]) for row in rows]


async def undisturbed(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    async with deployed(folder) as site:
        await site.gateway()
        await site.worker()
        await site.dispatcher()
        await site.pipelines()
        return {of: await rows_of(site, await submit_run(site, documents(of))) for of in ("one", "other")}


async def test_equal_ids_in_two_runs_with_two_of_each_process(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path / "undisturbed")
    assert expected["one"] != expected["other"]
    chance = random.Random(37)
    async with deployed(tmp_path / "hurt") as site:
        await site.gateway()
        pairs = [
            [await site.worker(engine=SLOW) for _ in range(2)],
            [await site.dispatcher() for _ in range(2)],
            [await site.pipelines(run_window=4) for _ in range(2)],
        ]
        runs = {of: await submit_run(site, documents(of)) for of in ("one", "other")}

        num_killed = 0

        async def keep_killing() -> None:
            nonlocal num_killed
            for number in range(6):
                await asyncio.sleep(chance.uniform(0.1, 0.4))
                victim = chance.choice(pairs[number % 3])
                await victim.kill()
                num_killed += 1
                await victim.start()

        killing = asyncio.create_task(keep_killing())
        found = {of: await rows_of(site, run_id) for of, run_id in runs.items()}
        num_killed_meanwhile = num_killed
        await killing
        assert found == expected
        assert num_killed_meanwhile >= 3, "the runs had ended before much was killed"
        assert set((await times_fed(site)).values()) == {1}
        assert await site.unfinished() == 0


async def test_equal_names_of_two_bulk_submits(tmp_path: Path) -> None:
    """Metadata is the callers' own: equal there, and told apart by the jobs' ids."""
    async with deployed(tmp_path) as site:
        await site.gateway()
        workers = [await site.worker(engine=SLOW) for _ in range(2)]
        ledgers = [Ledger(site.http, Reference()) for _ in range(2)]
        await asyncio.gather(
            *(ledger.submit_many(asks.mixed(60), page=30, metadata={"custom_id": "mine"}) for ledger in ledgers)
        )
        for worker in workers:
            await worker.kill()
            await worker.start()
        for ledger in ledgers:
            record = Record(promise="", fault="")
            await ledger.settle(record, seconds=60)
            assert record.is_kept, record
            assert record.jobs == 60
        assert not set(ledgers[0].told) & set(ledgers[1].told)
