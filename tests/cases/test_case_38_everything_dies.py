"""llm-d-batch-gateway #645, ray #59522 and #57140: a batch whose processes all die starts over, or loses its place.

Kind: everything dies at once, the server too, in the middle of many lines of which one is bad. What was accepted goes
on from where it was, no line runs to a second end, and the bad line is named and stops no other.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.process import Process
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.site import Site
from tests.cases.deployment import deployed, end_of_run, output_rows, submit_run, times_fed

NUM_LINES, PAGE = 2000, 250
NUM_DOCUMENTS = 40


async def kill_everything(site: Site, processes: list[Process]) -> None:
    """All at once, then all again: the server first, as an operator would."""
    for process in processes:
        process.end()
    site.server.kill()
    site.server.start()
    for process in processes:
        await process.start()


async def test_two_thousand_lines_one_of_them_bad(tmp_path: Path) -> None:
    async with deployed(tmp_path) as site:
        processes = [await site.gateway(), await site.worker(engine={"fake_seconds_per_step": 0.001})]
        ledger = Ledger(site.http, Reference())
        lines = list(asks.mixed(NUM_LINES, max_tokens=4))
        bad = {"model": "fake", "input": "bad", "params": {"temperature": -1}}
        for start in range(0, NUM_LINES, PAGE):
            page: list[dict[str, Any]] = [
                {"model": "fake", "input": prompt, "params": params} for prompt, params in lines[start : start + PAGE]
            ]
            if start == 1000:
                page[125] = bad
            answer = (await site.http.post("/v1/jobs/bulk", json={"jobs": page})).json()
            for asked, item in zip(page, answer["data"], strict=True):
                if asked is bad:
                    assert (item["status"], item["error"]["param"]) == (400, "params.temperature")
                else:
                    assert item["status"] == 202
                    ledger.note(item["job"]["id"], asked["input"], asked["params"], ["job.succeeded"])
        assert len(ledger.told) == NUM_LINES - 1
        async with asyncio.timeout(60):
            while await site.unfinished() > NUM_LINES * 3 // 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await site.unfinished(), "all had ended before anything was killed"
        await kill_everything(site, processes)
        record = Record(promise="", fault="")
        await ledger.settle(record, seconds=120)
        assert record.is_kept, record
        assert await site.unfinished() == 0


async def test_a_run_one_of_whose_documents_is_bad(tmp_path: Path) -> None:
    async with deployed(tmp_path) as site:
        processes: list[Process] = [
            await site.gateway(),
            await site.worker(engine={"fake_seconds_per_step": 0.005}),
            await site.dispatcher(),
            await site.pipelines(run_window=4),
        ]
        documents = [
            {"id": f"doc-{number}", "text": " ".join(f"{number}x{position}" for position in range(12))}
            for number in range(NUM_DOCUMENTS)
        ]
        documents[17] |= {"text": "  "}
        run_id = await submit_run(site, documents)
        async with asyncio.timeout(60):
            while (await site.http.get(f"/v1/runs/{run_id}")).json()["counts"]["chunks_done"] < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await kill_everything(site, processes)
        run = await end_of_run(site, run_id)
        assert run["status"] == "succeeded", run
        rows = await output_rows(site, run_id)
        assert [row["id"] for row in rows] == [document["id"] for document in documents]
        assert [row["id"] for row in rows if row["status"] != "succeeded"] == ["doc-17"]
        assert rows[17]["error"]["code"] == "empty_document"
        assert set((await times_fed(site)).values()) == {1}
        assert await site.unfinished() == 0
