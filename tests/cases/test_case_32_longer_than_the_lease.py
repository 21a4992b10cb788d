"""taskiq-redis #101 and #123, dramatiq #692: work that outlasts its lease is given to a second worker.

Kind: a lease that ends under living work. A generation of three leases, three workers, and processes that keep every
processor busy: one execution each, one terminal event, and no token generated twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.chaos import asks
from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from tests.cases.deployment import deployed

LEASE_SECONDS, STEP_SECONDS = 2.0, 0.02
NUM_TOKENS = round(3 * LEASE_SECONDS / STEP_SECONDS)


async def test_one_execution_however_busy_the_machine(tmp_path: Path) -> None:
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)  # noqa: ASYNC220
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        async with deployed(tmp_path) as site:
            await site.gateway()
            engine = {"fake_seconds_per_step": STEP_SECONDS}
            workers = [
                await site.worker(lease_seconds=LEASE_SECONDS, renew_seconds=0.4, engine=engine) for _ in range(3)
            ]  # fmt: skip
            ledger, record = Ledger(site.http, Reference()), Record(promise="", fault="")
            for number in range(6):
                await ledger.submit_until_accepted(*asks.long(number, max_tokens=NUM_TOKENS))
            await ledger.settle(record, seconds=120)
            assert record.is_kept, record
            assert {audit.attempts for audit in ledger.audits.values()} == {1}
            generated = sum([await worker.metric("generation_tokens_total") for worker in workers])
            assert generated == 6 * NUM_TOKENS
    finally:
        for process in busy:
            process.kill()
            process.wait()
