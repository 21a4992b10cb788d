"""What a Cluster does to us: slots that move, servers that fail over, addresses of the other kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from bench.chaos.clusters import Clustered, clustered
from infra import durability
from infra.addresses import ClusterAddress
from infra.cluster import key_of, slot_of
from infra.connect import Server
from infra.contracts import Claim
from infra.errors import StoreUnavailable, StoreUnsuitable
from infra.jobs import RedisJobs
from infra.keys import Lane
from infra.settings import StoreSettings
from infra.states import Status
from tests.infra.conftest import operator
from tests.infra.jobs_for_tests import (
    ALIAS,
    LEASE,
    check_log,
    claimed,
    delta,
    new_job,
    publication,
    submitted,
    success,
    types,
)


@pytest.fixture
async def jobs(cluster_url: str) -> AsyncIterator[RedisJobs]:
    opened = await RedisJobs.connect(cluster_url)
    yield opened
    await opened.close()


class Move:
    """Moves a slot to the next primary, as an operator does: key by key."""

    def __init__(self, cluster: Clustered, slot: int) -> None:
        self._slot = slot
        source = cluster.holder(slot)
        self._source = redis.Redis.from_url(source.url)
        self._others = [redis.Redis.from_url(server.url) for server in cluster.primaries if server is not source]
        self._target = self._others[0]
        self._password = cluster.password

    def begin(self) -> None:
        self._target.execute_command("CLUSTER SETSLOT", self._slot, "IMPORTING", _name(self._source))
        self._source.execute_command("CLUSTER SETSLOT", self._slot, "MIGRATING", _name(self._target))

    def move(self, *keys: str) -> None:
        """These keys, or all of the slot."""
        there = list(keys) or self._source.execute_command("CLUSTER GETKEYSINSLOT", self._slot, 10_000)
        if there:
            port = self._target.connection_pool.connection_kwargs["port"]
            self._source.execute_command(
                "MIGRATE", "127.0.0.1", port, "", 0, 5000, "AUTH", self._password, "KEYS", *there
            )

    def end(self) -> None:
        for client in (self._target, self._source, *self._others):
            client.execute_command("CLUSTER SETSLOT", self._slot, "NODE", _name(self._target))


def _name(client: redis.Redis) -> bytes:
    name: bytes = client.execute_command("CLUSTER MYID")
    return name


def test_the_key_of_a_command() -> None:
    assert key_of(("GET", "k")) == "k"
    assert key_of(("EVALSHA", "digest", 2, "k", "l", "argument")) == "k"
    assert key_of(("EVAL", "text", 0, "argument")) is None
    assert key_of(("XREAD", "COUNT", 1, "BLOCK", 5, "STREAMS", "k", "l", b"0-0", b"0-0")) == "k"
    assert key_of(("XINFO STREAM", "k")) == "k"
    assert key_of(("COMMAND INFO", "XADD")) is key_of(("WAIT", 1, 100)) is key_of(("TIME",)) is None


def test_keys_of_a_lane_share_a_slot_and_lanes_do_not() -> None:
    assert len({slot_of(key) for key in (*Lane(7).declared, Lane(7).job("job-7-x"), Lane(7).mark)}) == 1
    assert len({slot_of(Lane(number).state) for number in range(1, 17)}) == 16


def test_all_parts_of_a_cluster_address() -> None:
    address = ClusterAddress.parse("rediss+cluster://me:p%40ss@one:1,two,[::1]:3/?ssl_ca_certs=/ca.crt")
    assert address is not None
    assert address.hosts == (("one", 1), ("two", 6379), ("::1", 3))
    assert address.url_of(("::1", 3)) == "rediss://me:p%40ss@[::1]:3/0?ssl_ca_certs=%2Fca.crt"
    with pytest.raises(StoreUnsuitable, match="database 0 alone"):
        Server("redis+cluster://:secret@one:1/2")


async def test_an_address_of_the_other_kind_is_refused(cluster_url: str, redis_url: str) -> None:
    address = ClusterAddress.parse(cluster_url)
    assert address is not None
    with pytest.raises(StoreUnsuitable, match=r"redis\+cluster://"):
        await RedisJobs.connect(address.url_of(address.hosts[0]))
    parts = urlsplit(redis_url)
    with pytest.raises(StoreUnsuitable, match="in no Cluster"):
        await RedisJobs.connect(f"redis+cluster://{parts.netloc}")


async def test_one_server_that_answers_is_enough_to_find_all(cluster_url: str) -> None:
    login, _, hosts = cluster_url.partition("@")
    jobs = await RedisJobs.connect(f"{login}@127.0.0.1:9,{hosts.split(',')[2]}")
    await submitted(jobs, await jobs.open_lane(ALIAS))
    await jobs.close()


async def test_a_batch_over_many_slots_keeps_its_order(cluster_url: str) -> None:
    server = Server(cluster_url)
    await server.batch(*(("SET", f"key-{number}", number) for number in range(50)))
    answers = await server.raw_batch(*(("GET", f"key-{number}") for number in range(50)), ("HGETALL", "key-1"))
    assert answers[:50] == [b"%d" % number for number in range(50)]
    assert isinstance(answers[50], redis.ResponseError)
    with pytest.raises(ValueError, match="touch 2 slots"):
        await server.batch(("SET", "a", 1), ("SET", "b", 1), ("WAIT", 0, 1))
    with pytest.raises(ValueError, match="touch 0 slots"):
        await server.command("TIME")
    await server.close()


async def test_a_slot_that_has_moved_is_found(jobs: RedisJobs, redis_cluster: Clustered) -> None:
    lane = await jobs.open_lane(ALIAS)
    first, second = await submitted(jobs, lane), await submitted(jobs, lane)
    claim = await claimed(jobs, lane)
    await jobs.wait_for_work([lane], timeout=0)
    waiting = asyncio.create_task(jobs.wait_for_work([lane], timeout=30))
    await asyncio.sleep(0.05)
    move = Move(redis_cluster, slot_of(Lane(lane).state))
    move.begin()
    move.move()
    move.end()
    assert await jobs.publish(lane, [publication(claim, delta("a", 1))]) == []
    assert await jobs.commit(claim.hold, success("a", 1))
    assert types(await check_log(jobs, first)) == ["queued", "started", "delta", "succeeded"]
    assert (await claimed(jobs, lane)).job.id == second
    await submitted(jobs, lane)
    assert await asyncio.wait_for(waiting, 10) == set()  # a blocked reader went along


async def test_a_slot_on_its_way_is_refused_whole_and_its_records_are_read(
    jobs: RedisJobs, redis_cluster: Clustered
) -> None:
    lane = await jobs.open_lane(ALIAS)
    names = Lane(lane)
    moved, kept = await submitted(jobs, lane), await submitted(jobs, lane)
    claim = await claimed(jobs, lane)
    assert claim.job.id == moved
    with operator(redis_cluster.url) as client:
        _complete(client, names)
    move = Move(redis_cluster, slot_of(names.state))
    move.begin()
    for keys in ((), (names.job(moved), names.events(moved)), (names.due, names.state)):
        if keys:
            move.move(*keys)
        refused = new_job(lane)
        for call in (
            jobs.submit(refused),
            jobs.claim(lane, "w", free_tokens=None, lease_seconds=LEASE),
            jobs.commit(claim.hold, success()),
            jobs.renew(lane, [claim.hold], lease_seconds=LEASE),
            jobs.cancel(kept),
            jobs.load(lane),
        ):
            with pytest.raises(StoreUnavailable, match="being moved"):
                await call
        assert await jobs.get(refused.id) is None
        for job_id, status in ((moved, Status.RUNNING), (kept, Status.QUEUED)):
            job = await jobs.get(job_id)
            assert job is not None and job.status is status
            assert len(await jobs.events(job_id)) == (2 if job_id == moved else 1)
    move.move()
    move.end()
    assert await jobs.commit(claim.hold, success())
    assert (await claimed(jobs, lane)).job.id == kept
    assert types(await check_log(jobs, moved)) == ["queued", "started", "succeeded"]


def _complete(client: redis.Redis, names: Lane) -> None:
    """Makes all keys of a lane that scripts declare, so that only what never exists is missing."""
    for key in names.declared:
        if key != names.never and not client.exists(key):
            if ":waiting:" in key or key in (names.expiry, names.outbox, names.dead, names.watch):
                client.zadd(key, {"nothing": 10**15})
            else:
                client.xgroup_create(key, "workers", mkstream=True)


async def test_a_primary_that_dies_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "WAIT_SECONDS", 0.5)
    with clustered(tmp_path, num_replicas=1) as cluster:
        kept = StoreSettings(durability="replicated", durability_replicas=1)
        jobs = await RedisJobs.connect(cluster.url, kept=kept)
        lanes = [await jobs.open_lane(alias) for alias in ("a", "b", "c")]
        holders = [cluster.holder(slot_of(Lane(lane).state)) for lane in lanes]
        assert len({server.url for server in holders}) > 1
        ids = [await submitted(jobs, lane) for lane in lanes]
        for _ in lanes:
            await jobs.wait_for_work(lanes, timeout=0.1)
        holders[0].kill()
        with pytest.raises(StoreUnavailable):
            await submitted(jobs, lanes[0])
        claims = []
        for lane, job_id in zip(lanes, ids, strict=True):
            claim = await _until_claimed(jobs, lane)
            assert claim.job.id == job_id  # the first one too, by what its replica had
            claims.append(claim)
        assert await jobs.commit(claims[0].hold, success())
        assert isinstance(await jobs.wait_for_work(lanes, timeout=1), set)
        with pytest.raises(StoreUnavailable, match="1 replicas, only on 0"):
            await submitted(jobs, lanes[0])  # it is promoted and has no replica itself
        holders[0].start()
        assert await _until_submitted(jobs, lanes[0])
        await jobs.close()


async def _until_claimed(jobs: RedisJobs, lane: int) -> Claim:
    async with asyncio.timeout(30):
        while True:
            try:
                return await claimed(jobs, lane)
            except StoreUnavailable:
                await asyncio.sleep(0.1)


async def _until_submitted(jobs: RedisJobs, lane: int) -> str:
    async with asyncio.timeout(30):
        while True:
            try:
                return await submitted(jobs, lane)
            except StoreUnavailable:
                await asyncio.sleep(0.1)


async def test_one_memory_full_refuses_only_its_own_lanes(jobs: RedisJobs, redis_cluster: Clustered) -> None:
    lanes = [await jobs.open_lane(alias) for alias in ("a", "b", "c")]
    holders = [redis_cluster.holder(slot_of(Lane(lane).state)) for lane in lanes]
    full = holders[0]
    elsewhere = next(lane for lane, holder in zip(lanes, holders, strict=True) if holder is not full)
    with redis.Redis.from_url(full.url) as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.1))
        try:
            with pytest.raises(StoreUnavailable, match="80%"):
                await submitted(jobs, lanes[0])
            await submitted(jobs, elsewhere)
        finally:
            client.config_set("maxmemory", 0)
