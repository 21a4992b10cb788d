"""Sentinels, real ones: a primary that dies, one that is demoted while we speak to it, and blocked readers of both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from bench.chaos.sentinels import SERVICE, Guarded, guarded
from infra.addresses import SentinelAddress
from infra.embedded import server_binary
from infra.errors import StoreUnavailable
from infra.jobs import RedisJobs
from infra.settings import StoreSettings
from tests.infra.jobs_for_tests import ALIAS, check_log, claimed, delta, publication, submitted, success, types

T = TypeVar("T")
KEPT = StoreSettings(durability="replicated", durability_replicas=1)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Guarded]:
    with guarded(tmp_path, server_binary()) as made:
        yield made


async def answered(call: Callable[[], Awaitable[T]]) -> tuple[T, int]:
    """The answer once there is one, and how often the store was away before."""
    num_away = 0
    async with asyncio.timeout(40):
        while True:
            try:
                return await call(), num_away
            except StoreUnavailable:
                num_away += 1
                await asyncio.sleep(0.1)


async def test_a_primary_that_dies_is_followed(servers: Guarded) -> None:
    jobs = await RedisJobs.connect(servers.url, kept=KEPT)
    lane = await jobs.open_lane(ALIAS)
    first, second = await submitted(jobs, lane), await submitted(jobs, lane)
    claim = await claimed(jobs, lane)
    await jobs.publish(lane, [publication(claim, delta("a", 1))])
    await submitted(jobs, await jobs.open_lane("another"))  # what it waits for is behind all of the above
    await jobs.wait_for_work([lane], timeout=0)
    waiting = asyncio.create_task(jobs.wait_for_work([lane], timeout=30))
    servers.primary.kill()
    with pytest.raises(StoreUnavailable):  # its blocked reader is told, and not left waiting
        await asyncio.wait_for(waiting, 10)
    is_good, num_away = await answered(lambda: jobs.commit(claim.hold, success("a", 1)))
    assert is_good and num_away > 0
    servers.rejoin()  # `replicated` accepts nothing without a replica
    job_id, _ = await answered(lambda: submitted(jobs, lane))
    assert types(await check_log(jobs, first)) == ["queued", "started", "delta", "succeeded"]
    assert (await claimed(jobs, lane)).job.id == second
    await answered(lambda: jobs.wait_for_work([lane], timeout=0.1))
    assert (await claimed(jobs, lane)).job.id == job_id
    await jobs.close()


async def test_a_primary_that_is_demoted_is_left(servers: Guarded) -> None:
    jobs = await RedisJobs.connect(servers.url, kept=KEPT)
    lane = await jobs.open_lane(ALIAS)
    first = await submitted(jobs, lane)
    claim = await claimed(jobs, lane)
    await jobs.wait_for_work([lane], timeout=0)
    waiting = asyncio.create_task(jobs.wait_for_work([lane], timeout=30))
    await asyncio.sleep(0.1)
    address = SentinelAddress.parse(servers.url)
    assert address is not None
    with redis.Redis(port=address.sentinels[0][1]) as sentinel:
        sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE)
    async with asyncio.timeout(30):
        while not _is_primary(servers.replica.url):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    # The old one may take a write or two until it is told; `replicated` accepts none of those.
    job_id, _ = await answered(lambda: submitted(jobs, lane))
    is_good, _ = await answered(lambda: jobs.commit(claim.hold, success()))
    assert is_good
    await answered(lambda: asyncio.wait_for(_rung(waiting), 20))  # an error or a ring, and no reader that hangs
    with redis.Redis.from_url(servers.replica.url) as client:
        assert client.exists(f"ms:{{{lane}}}:job:{job_id}")  # written to the new one
    assert types(await check_log(jobs, first)) == ["queued", "started", "succeeded"]
    assert (await claimed(jobs, lane)).job.id == job_id
    await jobs.close()


def _is_primary(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            return bool(client.info("replication")["role"] == "master")
        except redis.ConnectionError:  # a sentinel closes connections when it changes roles
            return False


async def _rung(waiting: asyncio.Task[set[str]]) -> None:
    await asyncio.wait([waiting])
    if not waiting.cancelled() and (error := waiting.exception()) is not None:
        assert isinstance(error, StoreUnavailable)
