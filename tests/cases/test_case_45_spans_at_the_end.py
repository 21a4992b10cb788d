"""otel-contrib #4916, otel-python #4043: processes that end at once lose their spans, or hang with a dead collector.

Kind: telemetry and the end of a process. Spans that were not sent yet are sent on SIGTERM, whoever made them; a
collector that takes connections and never answers holds nobody beyond the grace.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from bench.chaos import asks
from bench.chaos.endpoint import endpoint
from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from tests.cases.deployment import deployed, spans_of, telemetry_to

GRACE_SECONDS = 15.0
NUM_WORKERS = 10


async def test_ten_workers_that_each_run_one_job_send_ten_spans(tmp_path: Path) -> None:
    async with deployed(tmp_path) as site, endpoint() as collector:
        # Batches that would leave after an hour: what arrives was flushed at the end.
        site.environment = telemetry_to(collector.port) | {"OTEL_BSP_SCHEDULE_DELAY": "3600000"}
        gateway = await site.gateway()
        ids = []
        for number in range(NUM_WORKERS):
            worker = await site.worker()
            ledger, record = Ledger(site.http, None), Record(promise="", fault="")
            ids.append(await ledger.submit_until_accepted(*asks.long(number, max_tokens=4)))
            await ledger.settle(record, seconds=30)
            assert record.is_kept, record
            assert await worker.stop() == 0
        assert await gateway.stop() == 0
        spans = spans_of(collector)
        processed = [span for span in spans if span.name.startswith("process ")]
        assert sorted(span.attributes["gen_ai.response.id"] for span in processed) == sorted(ids)
        assert all(span.is_ended for span in spans)


async def test_a_collector_that_never_answers_holds_nobody(tmp_path: Path) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side gives up
        writer.close()

    dead = await asyncio.start_server(never, "127.0.0.1", 0)
    async with deployed(tmp_path) as site:
        site.environment = telemetry_to(dead.sockets[0].getsockname()[1])
        processes = [await site.gateway(), await site.worker(), await site.dispatcher(), await site.pipelines()]
        ledger, record = Ledger(site.http, None), Record(promise="", fault="")
        for number in range(5):
            await ledger.submit_until_accepted(*asks.long(number, max_tokens=4))
        await ledger.settle(record, seconds=30)
        assert record.is_kept, record
        for process in processes:
            process.send(signal.SIGTERM)
        codes = [await process.ended(seconds=GRACE_SECONDS) for process in processes]
        assert codes == [0, 0, 0, 0], site.output
    dead.close()
