"""How most scenarios end: every job at its end, and nothing left."""

from __future__ import annotations

from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from bench.chaos.site import Site


async def finish(site: Site, ledger: Ledger, record: Record, *, seconds: float) -> Record:
    """Every job to its end, then nothing may be left: no entries, no blocks."""
    await ledger.settle(record, seconds=seconds)
    record.leaked_blocks += await site.leaked_blocks()
    record.demand(await site.unfinished() == 0, "the server still counts unfinished jobs")
    return record
