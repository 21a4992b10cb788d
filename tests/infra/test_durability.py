"""What acceptances and outcomes wait for, with real servers: disk, replicas, and both missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from infra import durability
from infra.embedded import EmbeddedServer
from infra.errors import StoreUnavailable, StoreUnsuitable
from infra.jobs import RedisJobs
from infra.settings import StoreSettings
from infra.states import Status
from tests.infra.jobs_for_tests import ALIAS, claimed, new_job, submitted, success

FSYNC = StoreSettings(durability="fsync")
REPLICATED = StoreSettings(durability="replicated", durability_replicas=1)


def until_replicating(primary: EmbeddedServer) -> None:
    with redis.Redis.from_url(primary.url) as client:
        for number in range(200):
            client.set("probe", number)  # a connection that wrote nothing has nothing to wait for
            if client.wait(1, 100) == 1:
                client.delete("probe")
                return
    raise AssertionError("the replica does not follow")


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "primary", directives=["appendfsync always", "repl-diskless-sync-delay 0"])
    server.start()
    yield server
    server.kill()


@pytest.fixture
def replica(tmp_path: Path, primary: EmbeddedServer) -> Iterator[EmbeddedServer]:
    password, _, address = primary.url.removeprefix("redis://:").partition("@")
    host, _, port = address.removesuffix("/0").partition(":")
    server = EmbeddedServer(
        tmp_path / "replica",
        directives=[f"replicaof {host} {port}", f"masterauth {password}"],
    )
    server.start()
    until_replicating(primary)
    yield server
    server.kill()


async def test_fsync_accepts_and_ends_jobs(primary: EmbeddedServer) -> None:
    jobs = await RedisJobs.connect(primary.url, kept=FSYNC)
    lane = await jobs.open_lane(ALIAS)
    job_id = await submitted(jobs, lane)
    assert not await jobs.submit(new_job(lane, job_id.rsplit("-", 1)[1]))
    claim = await claimed(jobs, lane)
    assert await jobs.commit(claim.hold, success())
    job = await jobs.get(job_id)
    assert job is not None and job.status is Status.SUCCEEDED
    assert (await jobs.events(job_id))[-1].is_last
    await jobs.close()


async def test_fsync_wants_a_server_that_syncs_before_it_answers(primary: EmbeddedServer) -> None:
    with redis.Redis.from_url(primary.url) as client:
        client.config_set("appendfsync", "everysec")
        with pytest.raises(StoreUnsuitable, match="appendfsync always"):
            await RedisJobs.connect(primary.url, kept=FSYNC)
        client.config_set("appendonly", "no")
        with pytest.raises(StoreUnsuitable, match="appendonly yes"):
            await RedisJobs.connect(primary.url, kept=FSYNC)


async def test_replicated_waits_for_replicas_and_says_so_without(
    primary: EmbeddedServer, replica: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "WAIT_SECONDS", 0.5)
    jobs = await RedisJobs.connect(primary.url, kept=REPLICATED)
    lane = await jobs.open_lane(ALIAS)
    job_id = await submitted(jobs, lane)
    claim = await claimed(jobs, lane)
    replica.kill()
    with pytest.raises(StoreUnavailable, match="1 replicas, only on 0"):
        await submitted(jobs, lane)
    assert await jobs.commit(claim.hold, success())  # the worker need not wait: whoever tells of it does
    reads = (jobs.get, jobs.look, jobs.events, lambda job_id: jobs.read_logs(lane, {job_id: -1}, limit=10))
    for read in reads:
        with pytest.raises(StoreUnavailable):
            await read(job_id)
    replica.start()
    until_replicating(primary)
    job = await jobs.get(job_id)
    assert job is not None and job.status is Status.SUCCEEDED
    assert (await jobs.events(job_id))[-1].is_last
    assert (await jobs.read_logs(lane, {job_id: -1}, limit=10))[job_id] == await jobs.events(job_id)
    assert await jobs.look(job_id) == (job, None)
    await jobs.close()


async def test_a_refused_submit_may_be_repeated(
    primary: EmbeddedServer, replica: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "WAIT_SECONDS", 0.5)
    jobs = await RedisJobs.connect(primary.url, kept=REPLICATED)
    lane = await jobs.open_lane(ALIAS)
    job = new_job(lane)
    replica.kill()
    for _ in range(2):  # the second changes nothing, and must not pass for that
        with pytest.raises(StoreUnavailable):
            await jobs.submit(job)
    replica.start()
    until_replicating(primary)
    assert await jobs.submit(job) is None
    await jobs.close()


async def test_fast_waits_for_nothing(primary: EmbeddedServer) -> None:
    jobs = await RedisJobs.connect(primary.url)
    await submitted(jobs, await jobs.open_lane(ALIAS))
    with redis.Redis.from_url(primary.url) as client:
        assert not client.keys("*:mark")
    await jobs.close()


async def test_what_is_kept_is_told_also_when_memory_is_full(primary: EmbeddedServer, replica: EmbeddedServer) -> None:
    """Work that ends then must be told of: the proof itself needs a little room."""
    jobs = await RedisJobs.connect(primary.url, kept=REPLICATED)
    lane = await jobs.open_lane(ALIAS)
    job_id = await submitted(jobs, lane)
    claim = await claimed(jobs, lane)
    with redis.Redis.from_url(primary.url) as client:
        client.config_set("maxmemory", 1)
        assert await jobs.commit(claim.hold, success())
        job = await jobs.get(job_id)
        assert job is not None and job.status is Status.SUCCEEDED
        assert (await jobs.events(job_id))[-1].is_last
        client.config_set("maxmemory", 0)
    await jobs.close()
