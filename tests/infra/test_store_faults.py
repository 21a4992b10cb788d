"""What a server does to us: forgets scripts, loses groups and lanes, drops connections, fills up, fails over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import redis

from infra.contracts import Claim, Hold, Tier, Webhook
from infra.embedded import EmbeddedServer
from infra.errors import StoreUnavailable, StoreUnsuitable, UnknownJob
from infra.jobs import RedisJobs
from infra.keys import Lane, tenant_jobs
from infra.settings import QueueSettings
from infra.states import Status
from tests.infra.conftest import operator
from tests.infra.jobs_for_tests import (
    ALIAS,
    LEASE,
    SHORT,
    check_log,
    claimed,
    delta,
    lapse,
    new_job,
    publication,
    submitted,
    success,
    types,
)


@pytest.fixture
async def jobs(server_url: str) -> AsyncIterator[RedisJobs]:
    opened = await RedisJobs.connect(server_url)
    yield opened
    await opened.close()


@pytest.fixture
def server(server_url: str) -> Iterator[redis.Redis]:
    with operator(server_url) as server:
        yield server


async def test_forgotten_scripts_are_loaded_again(jobs: RedisJobs, server: redis.Redis) -> None:
    lane = await jobs.open_lane(ALIAS)
    job_id = await submitted(jobs, lane)
    server.script_flush()
    claim = await claimed(jobs, lane)
    server.script_flush()
    assert await jobs.publish(lane, [publication(claim, delta("a", 1))]) == []
    server.script_flush()
    assert await jobs.commit(claim.hold, success())
    assert types(await check_log(jobs, job_id)) == ["queued", "started", "delta", "succeeded"]


async def test_a_lost_group_is_made_again_and_nothing_runs_twice(jobs: RedisJobs, server: redis.Redis) -> None:
    lane = await jobs.open_lane(ALIAS)
    ids = [await submitted(jobs, lane) for _ in range(6)]
    running, ended, given_back = [await claimed(jobs, lane) for _ in range(3)]
    assert await jobs.commit(ended.hold, success())
    assert await jobs.release(given_back.hold, reason="retry", delay_seconds=60)
    server.xgroup_destroy(Lane(lane).stream(Tier.STANDARD), "workers")
    claims = []
    while (claim := await jobs.claim(lane, "w", free_tokens=None, lease_seconds=LEASE)) is not None:
        claims.append(claim)
    assert [claim.job.id for claim in claims] == ids[3:]  # neither the running nor the delayed one
    for claim in [running, *claims]:
        assert await jobs.commit(claim.hold, success())
    load = await jobs.load(lane)
    assert (load.running, load.waiting["standard"]) == (0, 1)


async def test_entries_without_a_record_are_cleared_away(jobs: RedisJobs, server: redis.Redis) -> None:
    lane = await jobs.open_lane(ALIAS)
    gone, good = await submitted(jobs, lane), await submitted(jobs, lane)
    server.delete(Lane(lane).job(gone), Lane(lane).events(gone))
    assert (await claimed(jobs, lane)).job.id == good
    assert server.xlen(Lane(lane).stream(Tier.STANDARD)) == 1
    for claim in range(2):  # and those in the clocks
        server.zadd(Lane(lane).due, {f"job-{lane}-nosuchjob{claim}": 0})
        server.zadd(Lane(lane).expiry, {f"job-{lane}-nosuchjob{claim}": 0})
        assert await jobs.claim(lane, "w", free_tokens=None, lease_seconds=LEASE) is None
        assert (await jobs.sweep(lane)).expired == []
    assert server.zcard(Lane(lane).due) == 1
    assert server.zcard(Lane(lane).expiry) == 0


async def test_all_that_a_finished_job_leaves_is_its_record(jobs: RedisJobs, server: redis.Redis) -> None:
    lane = await jobs.open_lane(ALIAS)
    names = Lane(lane)
    for end in ("commit", "cancel", "cancel running", "expire"):
        job_id = await submitted(jobs, lane, queue_ttl_ms=10 if end == "expire" else 10**6)
        if end == "commit":
            assert await jobs.commit((await claimed(jobs, lane)).hold, success())
        elif end == "expire":
            await lapse()
            assert (await jobs.sweep(lane)).expired == [job_id]
        else:
            if "running" in end:
                await claimed(jobs, lane)
            await jobs.cancel(job_id)
        for tier in Tier:
            assert server.xlen(names.stream(tier)) == 0
            assert server.zcard(names.waiting(tier)) == 0
        assert server.zcard(names.due) == server.zcard(names.expiry) == server.zcard(names.outbox) == 0
        assert server.xpending(names.stream(Tier.STANDARD), "workers")["pending"] == 0
        assert 0 < server.pttl(names.job(job_id)) <= 7 * 86400 * 1000
        assert 0 < server.pttl(names.events(job_id)) <= 3600 * 1000


async def test_many_expired_jobs_are_met_in_one_claim(jobs: RedisJobs) -> None:
    lane = await jobs.open_lane(ALIAS)
    await asyncio.gather(*(submitted(jobs, lane, queue_ttl_ms=1) for _ in range(700)))
    good = await submitted(jobs, lane)
    await lapse()
    assert (await claimed(jobs, lane)).job.id == good
    assert (await jobs.load(lane)).waiting["standard"] == 0


async def test_many_lapsed_leases_are_swept_and_claimed(jobs: RedisJobs) -> None:
    lane = await jobs.open_lane(ALIAS)
    ids = [await submitted(jobs, lane, attempt_timeout_ms=1) for _ in range(300)]
    for _ in ids:
        await claimed(jobs, lane)
    await lapse()
    assert sorted((await jobs.sweep(lane)).failed) == sorted(ids)


async def test_a_listing_drops_what_is_long_gone_from_the_index(jobs: RedisJobs, server: redis.Redis) -> None:
    lane = await jobs.open_lane(ALIAS)
    gone = [await submitted(jobs, lane) for _ in range(3)]
    kept = await submitted(jobs, lane)
    coming = new_job(lane).id  # noted, and its submit is on its way
    index = tenant_jobs("default")
    server.zadd(index, dict.fromkeys(gone[:2], 1))
    server.zadd(index, {coming: server.zscore(index, kept) or 0})
    for job_id in gone:
        server.delete(Lane(lane).job(job_id))
    assert [job.id for job in await jobs.list_jobs("default", limit=2)] == [kept]
    assert [server.zscore(index, job_id) is None for job_id in (*gone, kept, coming)] == [
        True,
        True,
        False,
        False,
        False,
    ]


# --- connections ---


class Cutter:
    """A proxy before the server that can drop replies, and connections."""

    def __init__(self, url: str) -> None:
        self._target = url.split("@")[1].split("/")[0].split(":")
        self._url = url
        self._writers: list[asyncio.StreamWriter] = []
        self.drop_replies = 0  # connections are cut instead of that many replies

    async def __aenter__(self) -> Cutter:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    @property
    def url(self) -> str:
        port = self._server.sockets[0].getsockname()[1]
        return self._url.replace(":".join(self._target), f"127.0.0.1:{port}")

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, upstream_writer]

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, is_reply: bool) -> None:
            try:
                while data := await source.read(65536):
                    if is_reply and self.drop_replies:
                        self.drop_replies -= 1
                        break
                    target.write(data)
                    await target.drain()
            except ConnectionError:
                pass
            finally:
                writer.close()
                upstream_writer.close()

        await asyncio.gather(pump(reader, upstream_writer, False), pump(upstream_reader, writer, True))


async def test_verbs_whose_reply_is_lost_once_take_effect_once(redis_url: str) -> None:
    async with Cutter(redis_url) as cutter:
        jobs = await RedisJobs.connect(cutter.url)
        lane = await jobs.open_lane(ALIAS)
        job = new_job(lane, webhook=Webhook(url="https://example.com"))

        async def with_a_lost_reply(call: Callable[[], Awaitable[object]]) -> object:
            cutter.drop_replies = 1
            answer = await call()
            assert cutter.drop_replies == 0
            return answer

        await jobs.submit(new_job(lane, "warmupwarmup"))  # the look at the server's memory is behind us
        await jobs.cancel(f"job-{lane}-warmupwarmup")
        await with_a_lost_reply(lambda: jobs.submit(job))
        claim = await claimed(jobs, lane)
        first = publication(claim, delta("a", 1), first_number=claim.job.num_events)
        assert await with_a_lost_reply(lambda: jobs.publish(lane, [first])) == []
        assert await with_a_lost_reply(lambda: jobs.renew(lane, [claim.hold], lease_seconds=LEASE)) == []
        assert await with_a_lost_reply(lambda: jobs.release(claim.hold, reason="retry"))
        claim = await claimed(jobs, lane)
        last = publication(claim, delta("b", 2), first_number=claim.job.num_events)
        assert await with_a_lost_reply(lambda: jobs.commit(claim.hold, success("ab", 1, 2), last=last))
        log = types(await check_log(jobs, job.id))
        assert log == ["queued", "started", "delta", "requeued", "started", "delta", "succeeded"]
        assert len(await jobs.take_notices(lane, limit=10, hide_seconds=60)) == 1
        await jobs.close()


async def test_a_lost_claim_comes_back_when_its_lease_lapses(redis_url: str) -> None:
    async with Cutter(redis_url) as cutter:
        jobs = await RedisJobs.connect(cutter.url)
        lane = await jobs.open_lane(ALIAS)
        job_id = await submitted(jobs, lane)
        cutter.drop_replies = 1
        with pytest.raises(StoreUnavailable):
            await jobs.claim(lane, "w", free_tokens=None, lease_seconds=SHORT)
        await lapse()
        claim = await claimed(jobs, lane)
        assert (claim.job.id, claim.job.attempt) == (job_id, 2)
        await jobs.close()


async def test_a_named_claim_survives_lost_replies(redis_url: str) -> None:
    async with Cutter(redis_url) as cutter:
        jobs = await RedisJobs.connect(cutter.url)
        lane = await jobs.open_lane(ALIAS)
        job_id = await submitted(jobs, lane)

        async def claim() -> Claim | None:
            return await jobs.claim(lane, "w", free_tokens=None, lease_seconds=LEASE, call="1")

        cutter.drop_replies = 2
        with pytest.raises(StoreUnavailable):
            await claim()
        cutter.drop_replies = 1
        found = await claim()
        assert found is not None and found.hold == Hold(job_id=job_id, attempt=1)
        assert cutter.drop_replies == 0
        assert (await jobs.get(job_id)) == found.job
        await jobs.close()


async def test_cut_connections_are_opened_again(redis_url: str) -> None:
    async with Cutter(redis_url) as cutter:
        jobs = await RedisJobs.connect(cutter.url)
        lane = await jobs.open_lane(ALIAS)
        await jobs.wait_for_work([lane], timeout=0)
        waiting = asyncio.create_task(jobs.wait_for_work([lane], timeout=30))
        await asyncio.sleep(0.05)
        cutter.cut()
        with pytest.raises(StoreUnavailable):
            await waiting
        await submitted(jobs, lane)
        assert await asyncio.wait_for(jobs.wait_for_work([lane], timeout=30), 10) == set()  # it rings: nothing missed
        await claimed(jobs, lane)
        await jobs.close()


async def test_a_cancelled_wait_leaves_the_connection_usable(jobs: RedisJobs) -> None:
    lane = await jobs.open_lane(ALIAS)
    await jobs.wait_for_work([lane], timeout=0)
    for _ in range(5):
        waiting = asyncio.create_task(jobs.wait_for_work([lane], timeout=30))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await submitted(jobs, lane)
    assert await asyncio.wait_for(jobs.wait_for_work([lane], timeout=30), 10) == set()


async def test_unblocked_readers_look_again(redis_url: str) -> None:
    jobs, server = await RedisJobs.connect(redis_url), redis.Redis.from_url(redis_url)
    lane = await jobs.open_lane(ALIAS)
    await jobs.wait_for_work([lane], timeout=0)
    waiting = asyncio.create_task(jobs.wait_for_work([lane], timeout=60))
    await asyncio.sleep(0.05)
    blocked = [client["id"] for client in server.client_list() if client["cmd"] == "xread" and "b" in client["flags"]]
    assert blocked
    for client_id in blocked:
        server.client_unblock(int(client_id), error=True)
    assert await asyncio.wait_for(waiting, 10) == set()
    await jobs.close()
    server.close()


async def test_an_absent_server_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable):
        await RedisJobs.connect("redis://127.0.0.1:9/0")
    with pytest.raises(StoreUnsuitable, match="no address") as refused:
        await RedisJobs.connect("http://:secret@127.0.0.1:9/0")
    assert "secret" not in str(refused.value)


async def test_wrong_credentials_are_told(redis_url: str) -> None:
    with pytest.raises(StoreUnsuitable, match="credentials"):
        await RedisJobs.connect("redis://:wrong@" + redis_url.split("@")[1])


# --- servers of their own: settings and restarts ---


async def test_a_restarted_server_goes_on_where_it_was(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    jobs = await RedisJobs.connect(server.start())
    lane = await jobs.open_lane(ALIAS)
    first, second = await submitted(jobs, lane), await submitted(jobs, lane)
    claim = await claimed(jobs, lane)
    await jobs.publish(lane, [publication(claim, delta("a", 1))])
    server.stop()
    with pytest.raises(StoreUnavailable):
        await jobs.ping()
    with pytest.raises(StoreUnavailable):
        await jobs.renew(lane, [claim.hold], lease_seconds=LEASE)
    server.start()
    assert await jobs.renew(lane, [claim.hold], lease_seconds=LEASE) == []  # scripts, connections, lease: all there
    assert await jobs.commit(claim.hold, success("a", 1))
    assert types(await check_log(jobs, first)) == ["queued", "started", "delta", "succeeded"]
    assert (await claimed(jobs, lane)).job.id == second
    await jobs.close()
    server.stop()


async def test_another_eviction_policy_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as url, redis.Redis.from_url(url) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(StoreUnsuitable, match="noeviction"):
            await RedisJobs.connect(url)


async def test_full_memory_refuses_new_work_and_ends_old(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as url, redis.Redis.from_url(url) as server:
        jobs = await RedisJobs.connect(url)
        lane = await jobs.open_lane(ALIAS)
        job_id = await submitted(jobs, lane, webhook=Webhook(url="https://example.com"))
        given_back, cancelled = await submitted(jobs, lane), await submitted(jobs, lane)
        claim, other = await claimed(jobs, lane), await claimed(jobs, lane)
        server.config_set("maxmemory", 1)
        for _ in range(2):  # the server's own refusal, and ours before it
            refused = new_job(lane)
            with pytest.raises(StoreUnavailable):
                await jobs.submit(refused)
            assert await jobs.get(refused.id) is None
            jobs._has_room_until.clear()
        with pytest.raises(StoreUnavailable):
            await jobs.ping()
        assert await jobs.renew(lane, [claim.hold], lease_seconds=LEASE) == []
        assert await jobs.publish(lane, [publication(claim, delta("a", 1))]) == []
        assert await jobs.commit(claim.hold, success("a", 1))
        assert await jobs.release(other.hold, reason="hand_over")
        assert (await claimed(jobs, lane)).job.id == given_back
        await jobs.cancel(cancelled)
        (notice,) = await jobs.take_notices(lane, limit=10, hide_seconds=60)
        await jobs.delete_notice(notice)
        assert await jobs.events(job_id, after=3) == []  # the look behind the last event, too
        with pytest.raises(UnknownJob):
            await jobs.events(refused.id)
        assert types(await check_log(jobs, job_id)) == ["queued", "started", "delta", "succeeded"]
        server.config_set("maxmemory", 0)
        await submitted(jobs, lane)
        await jobs.ping()
        await jobs.close()


async def test_memory_nearly_full_refuses_new_work_early(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as url, redis.Redis.from_url(url) as server:
        jobs = await RedisJobs.connect(url)
        lane = await jobs.open_lane(ALIAS)
        server.config_set("maxmemory", int(server.info("memory")["used_memory"] * 1.1))
        with pytest.raises(StoreUnavailable, match="80%"):
            await jobs.submit(new_job(lane))
        await jobs.close()


async def test_a_replica_is_not_written_to(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as url, redis.Redis.from_url(url) as server:
        jobs = await RedisJobs.connect(url)
        lane = await jobs.open_lane(ALIAS)
        await submitted(jobs, lane)
        claim = await claimed(jobs, lane)
        server.replicaof("127.0.0.1", 9)
        with pytest.raises(StoreUnavailable):
            await jobs.renew(lane, [claim.hold], lease_seconds=LEASE)
        with pytest.raises(StoreUnavailable):
            await jobs.submit(new_job(lane))
        with pytest.raises(StoreUnavailable):
            await jobs.ping()
        server.replicaof("NO", "ONE")
        assert await jobs.renew(lane, [claim.hold], lease_seconds=LEASE) == []
        assert await jobs.commit(claim.hold, success())
        await jobs.close()


async def test_settings_of_retention_reach_the_server(server_url: str) -> None:
    settings = QueueSettings(record_seconds=100, event_log_seconds=50, dead_letter_seconds=200)
    jobs = await RedisJobs.connect(server_url, settings=settings)
    lane = await jobs.open_lane(ALIAS)
    job_id = await submitted(jobs, lane)
    for _ in range(3):
        await claimed(jobs, lane, lease_seconds=SHORT)
        await lapse()
    assert (await jobs.sweep(lane)).failed == [job_id]
    record = await jobs.get(job_id)
    assert record is not None and record.status is Status.FAILED
    with operator(server_url) as server:
        assert 100_000 < server.pttl(Lane(lane).job(job_id)) <= 200_000
        assert 0 < server.pttl(Lane(lane).events(job_id)) <= 50_000
    await jobs.close()
