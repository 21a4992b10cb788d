"""What one tenant may learn of another through the prefix cache: nothing."""

from __future__ import annotations

from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.yard import Yard


async def cache(yard: Yard) -> Record:
    record = Record(promise="tenant cache isolated", fault="the same prompt from two tenants")
    params = {"max_tokens": 2, "temperature": 0.0}
    async with yard.site() as site:
        await site.gateway(api_keys="key-of-one,key-of-another")
        worker = await site.worker()
        hits: dict[str, float] = {}
        for number in range(yard.size(3, 50)):
            prompt = f"{number} " + "the same long prompt of several blocks " * 20
            for step, key in (("first", "one"), ("again", "one"), ("other", "another")):
                site.http.headers["authorization"] = f"Bearer key-of-{key}"
                ledger = Ledger(site.http, Reference())
                before = await worker.metric("prefix_cache_hits_total")
                await ledger.submit_until_accepted(prompt, params)
                await ledger.settle(record, seconds=30)
                hits[step] = hits.get(step, 0.0) + await worker.metric("prefix_cache_hits_total") - before
        record.demand(hits["again"] > 0, "a tenant did not hit its own cache: nothing was tried")
        record.demand(hits["other"] == 0, f"{hits['other']:.0f} tokens were found in another tenant's cache")
        record.leaked_blocks += await site.leaked_blocks()
        record.figures = {"own hits": int(hits["again"]), "cross hits": int(hits["other"])}
    return record
