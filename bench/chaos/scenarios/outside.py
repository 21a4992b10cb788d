"""What leaves the deployment: webhooks, traces, logs; and what must never be reached."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import httpx
from standardwebhooks.webhooks import Webhook

from bench.chaos import asks
from bench.chaos.endpoint import endpoint
from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from bench.chaos.reference import Reference
from bench.chaos.scenarios.ending import finish
from bench.chaos.site import WEBHOOK_SECRET, Site
from bench.chaos.yard import Yard

BEHAVIOURS = ("ok", "error", "silent", "reset", "drip", "gone")


async def _outbox_empties(site: Site, *, seconds: float) -> bool:
    async with site.redis() as client:
        for _ in range(round(seconds / 0.1)):
            if not [key async for key in client.scan_iter("ms:{*}:outbox")]:
                return True
            await asyncio.sleep(0.1)
    return False


async def webhooks(yard: Yard) -> Record:
    record = Record(
        promise="webhook at least once, signed", fault="500, timeout, reset, drip, 410; SIGKILL dispatchers"
    )
    async with yard.site() as site, endpoint() as outside:
        await site.gateway()
        await site.worker(engine={"fake_seconds_per_step": 0.01})
        dispatchers = [await site.dispatcher(webhook_allow="127.0.0.1") for _ in range(2)]
        ledger = Ledger(site.http, Reference())
        paths: dict[str, str] = {}  # job id -> path
        for number, (prompt, params) in enumerate(asks.mixed(yard.size(30, 600))):
            path = f"{BEHAVIOURS[number % len(BEHAVIOURS)]}/{number}"
            paths[await ledger.submit_until_accepted(prompt, params, webhook={"url": outside.url(path)})] = path
        for number in range(yard.size(2, 8)):
            await asyncio.sleep(0.8)
            victim = dispatchers[number % 2]
            await victim.kill()
            await victim.start()
        await finish(site, ledger, record, seconds=120)
        record.demand(await _outbox_empties(site, seconds=yard.size(60, 240)), "the outbox did not empty")
        async with site.redis() as client:
            num_dead = await client.zcard("ms:webhooks:dead")
        tried: dict[str, set[str]] = {}  # path -> webhook ids
        for request in outside.requests:
            Webhook(WEBHOOK_SECRET).verify(request.body, request.headers)  # raises where the signature is wrong
            tried.setdefault(request.path, set()).add(request.headers["webhook-id"])
        missing = [path for path in paths.values() if path not in tried]
        record.lost += len(missing)
        record.duplicates += sum(len(ids) - 1 for ids in tried.values())
        num_gone = sum(path.startswith("gone") for path in paths.values())
        record.demand(num_dead == num_gone, f"{num_dead} dead letters, {num_gone} endpoints were gone")
        retried = Counter(path.split("/")[0] for path in (request.path for request in outside.requests))
        record.figures = {
            "webhooks": len(paths),
            "delivered": len(paths) - num_dead - len(missing),
            "dead letters": int(num_dead),
            "tries": sum(retried.values()),
        }
    return record


async def ssrf(yard: Yard) -> Record:
    record = Record(promise="SSRF closed", fault="every form of a denied address, and redirects to one")
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(yard.site())
        trap = await stack.enter_async_context(endpoint())
        await stack.enter_async_context(endpoint("::1", port=trap.port))
        allowed = await stack.enter_async_context(endpoint("127.0.0.2"))
        allowed.location = trap.url("ok")
        await site.gateway()
        await site.worker()
        await site.dispatcher(webhook_allow="127.0.0.2", webhook_schedule="0,0.1")
        ledger = Ledger(site.http, Reference())
        hosts = (
            "127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0", "127.0.0.1.",
            "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b:1::7f00:1]",
            "[2002:7f00:1::]", "[fec0::1]", "[fe80::1]", "[fc00::1]", "192.0.0.8", "192.88.99.1", "169.254.169.254",
            "100.64.0.1", "224.0.0.1", "255.255.255.255", "127.0.0.1%2f@127.0.0.2",
        )  # fmt: skip
        urls = [f"http://{host}:{trap.port}/ok" for host in hosts] + [allowed.url("redirect/1")]
        num_refused = 0
        for url in urls:
            job_id = await ledger.submit("a job", {"max_tokens": 2, "temperature": 0.0}, webhook={"url": url})
            num_refused += job_id is None
        await finish(site, ledger, record, seconds=60)
        record.demand(await _outbox_empties(site, seconds=60), "the outbox did not empty")
        record.demand(allowed.num_connections > 0, "the endpoint that redirects was not called: nothing was tried")
        record.demand(trap.num_connections == 0, f"{trap.num_connections} connections to denied addresses")
        record.figures = {
            "forms": len(urls),
            "refused at submit": num_refused,
            "connections to denied addresses": trap.num_connections,
        }
    return record


async def telemetry(yard: Yard) -> Record:
    record = Record(promise="no content in telemetry", fault="a canary as prompt, then in every log, span and metric")
    canary = "canary-7d1f0c-zwitschert"
    async with yard.site() as site, endpoint() as collector:
        site.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        gateway = await site.gateway()
        dispatcher = await site.dispatcher()
        worker = await site.worker(engine={"fake_poison": f"poison {canary}"})
        ledger = Ledger(site.http, Reference())
        for _ in range(5):
            await ledger.submit_until_accepted(f"hear the {canary} sing", {"max_tokens": 8, "temperature": 0.0})
        chat = {"model": "fake", "messages": [{"role": "user", "content": canary}], "max_tokens": 4}
        answer = await site.http.post("/v1/chat/completions", json=chat)
        record.demand(answer.status_code == 200, f"a chat was answered by {answer.status_code}")
        await site.http.post("/v1/chat/completions", json={**chat, "temperature": f"hot {canary}"})
        await site.http.post("/v1/jobs", json={"model": "fake", "input": canary, "params": {"max_tokens": 10**9}})
        await finish(site, ledger, record, seconds=60)
        metrics = (await site.http.get("/metrics")).text
        async with httpx.AsyncClient(trust_env=False) as http:
            metrics += (await http.get(f"http://127.0.0.1:{worker.metrics_port}/metrics")).text
        for process in (worker, dispatcher, gateway):
            await process.stop()
        spans = b"".join(request.body for request in collector.requests)
        record.demand(b"millstream" in spans, "no span arrived at the collector")
        found = metrics.count(canary) + site.output.count(canary) + spans.count(canary.encode())
        record.demand(found == 0, f"the canary was found {found} times")
        record.figures = {"span bytes": len(spans), "log bytes": len(site.output), "occurrences": found}
    return record
