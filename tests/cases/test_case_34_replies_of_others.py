"""Case 34 [redis-py#2624, #2665]: a slow way to the server, and callers who give up in the middle of a reply.

The kind: a connection that was given back with a reply still on its way, which the next caller takes for its own. Tried
at the store, whose calls are cancelled at random, and from outside, by 200 clients who drop their streams while others
read on.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import httpx

from bench.chaos.proxy import Proxy, proxy
from infra.blobs import open_blobs
from infra.jobs import RedisJobs
from infra.settings import GatewaySettings
from tests.gateway import gateway_aids
from tests.infra.jobs_for_tests import ALIAS, submitted
from tests.worker import worker_aids

NUM_DROPPED, NUM_READ = 200, 20


async def test_cancelled_calls_leave_no_reply_to_others(redis_url: str) -> None:
    chance = random.Random(34)
    async with proxy(redis_url) as (slow, url):
        jobs = await RedisJobs.connect(url)
        lane = await jobs.open_lane(ALIAS)
        ids = [await submitted(jobs, lane) for _ in range(20)]
        slow.delay_seconds = 0.004
        num_right = num_cancelled = 0

        async def asker(number: int) -> None:
            nonlocal num_right, num_cancelled
            for round_number in range(8):
                job_id = ids[(number * 7 + round_number) % len(ids)]
                call = asyncio.ensure_future(_asked(jobs, job_id, round_number % 3))
                if number % 2:
                    await asyncio.sleep(chance.uniform(0.0, 0.02))
                    call.cancel()
                    num_cancelled += 1
                    await asyncio.gather(call, return_exceptions=True)
                else:
                    assert await call == job_id
                    num_right += 1

        await asyncio.gather(*(asker(number) for number in range(40)))
        assert (num_right, num_cancelled) == (160, 160)
        await jobs.close()


async def _asked(jobs: RedisJobs, job_id: str, how: int) -> str:
    """The job's id, as three kinds of answers name it."""
    if how == 0:
        job = await jobs.get(job_id)
        return "" if job is None else job.id
    if how == 1:
        found = await jobs.look(job_id)
        return "" if found is None else found[0].id
    lane = int(job_id.split("-")[1])
    [(name, events)] = (await jobs.read_logs(lane, {job_id: -1}, limit=10)).items()
    assert events[0].type == "job.queued"
    return name


async def test_streams_that_are_dropped_leave_no_token_to_others(redis_url: str, tmp_path: Path) -> None:
    blobs = open_blobs((tmp_path / "blobs").as_uri())
    async with proxy(redis_url) as (slow, url):
        store = await RedisJobs.connect(url)
        backend = worker_aids.Backend(store, lambda: RedisJobs.connect(redis_url), blobs)
        settings = GatewaySettings(shutdown_seconds=2.0, default_max_tokens=24)
        async with (
            worker_aids.serving(backend),
            gateway_aids.serving(store, blobs, settings) as running,
            httpx.AsyncClient(base_url=running.url, timeout=60.0, limits=httpx.Limits(max_connections=300)) as client,
        ):
            await _streams(client, slow)
        await store.close()


async def _streams(client: httpx.AsyncClient, slow: Proxy) -> None:
    chance = random.Random(35)
    slow.delay_seconds = 0.002

    async def dropped(number: int) -> None:
        body = {"model": "fake", "input": f"dropped {number}", "params": {"seed": 7, "max_tokens": 40}}
        job = (await client.post("/v1/jobs", json=body)).json()
        async with client.stream("GET", f"/v1/jobs/{job['id']}/events") as events:
            enough = chance.randrange(1, 400)
            async for piece in events.aiter_bytes():
                enough -= len(piece)
                if enough < 0:
                    return

    async def read(number: int) -> None:
        prompt = f"read to its end {number}"
        params = {"seed": 7, "temperature": 0.0, "max_tokens": 40}
        job = (await client.post("/v1/jobs", json={"model": "fake", "input": prompt, "params": params})).json()
        tokens, numbers = [], []
        async with client.stream("GET", f"/v1/jobs/{job['id']}/events") as events:
            async for line in events.aiter_lines():
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    numbers.append(event["sequence_number"])
                    for delta in event.get("deltas", ()):
                        tokens += delta["token_ids"]
        assert numbers == list(range(len(numbers)))
        [(expected, _, _)] = worker_aids.undisturbed(prompt, max_tokens=40)
        assert tokens == expected

    await asyncio.gather(*(dropped(number) for number in range(NUM_DROPPED)), *(read(n) for n in range(NUM_READ)))
