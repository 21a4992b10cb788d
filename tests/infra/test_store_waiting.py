"""What the store knows of waiting: live workers, work by tier, places, sizes, and who is waited for."""

from __future__ import annotations

import asyncio

import pytest

from infra import work
from infra.contracts import NewJob, Outcome, Pace, Tier, Usage, WorkerRecord
from infra.settings import QueueSettings
from infra.states import Status
from infra.store import PLACE_LOOKS, JobStore, LaneLoad, Place
from infra.work import Sizes, Work, work_left
from tests.infra.jobs_for_tests import (
    ALIAS,
    ENOUGH_MS,
    LEASE,
    claimed,
    delta,
    lapse,
    new_job,
    publication,
    submitted,
    success,
)

OUTPUT = 8  # of a job of `new_job`, which costs 10


@pytest.fixture
async def lane(store: JobStore) -> int:
    return await store.open_lane(ALIAS)


def record(owner: str, **fields: object) -> WorkerRecord:
    whole = {"alias": ALIAS, "lanes": [1], "num_seats": 8, "free_tokens": 4096, "num_jobs": 0, **fields}
    return WorkerRecord(owner=owner, **whole)  # type: ignore[arg-type]


# --- workers ---


async def test_workers_are_those_who_told_of_themselves_lately(store: JobStore) -> None:
    pace = Pace(seconds_per_step=0.01, seconds_per_output_token=1e-4, seconds_per_prompt_token=1e-5, num_seats=8,
                kv_tokens=4096)  # fmt: skip
    await store.put_worker(record("b", remaining=[3, 5], pace=pace), keep_seconds=60)
    await store.put_worker(record("a"), keep_seconds=60)
    await store.put_worker(record("short"), keep_seconds=0.03)
    await store.put_worker(record("other", alias="other"), keep_seconds=60)
    assert [one.owner for one in await store.workers(ALIAS)] == ["a", "b", "short"]
    await lapse()
    found = await store.workers(ALIAS)
    assert [one.owner for one in found] == ["a", "b"]
    assert (found[1].remaining, found[1].pace) == ([3, 5], pace)
    assert all(40 <= one.age_ms < 60_000 for one in found)
    await store.put_worker(record("a", num_jobs=2), keep_seconds=60)
    await store.drop_worker(ALIAS, "b")
    await store.drop_worker(ALIAS, "never was")
    [left] = await store.workers(ALIAS)
    assert (left.owner, left.num_jobs) == ("a", 2) and left.age_ms < 10_000
    assert await store.workers("nobody") == []


async def test_workers_leave_nothing_behind(redis_url: str) -> None:
    import redis

    from infra.jobs import RedisJobs

    store = await RedisJobs.connect(redis_url)
    await store.put_worker(record("a"), keep_seconds=0.02)
    await store.put_worker(record("b"), keep_seconds=0.03)
    await lapse()
    with redis.Redis.from_url(redis_url) as server:
        assert server.keys() == []
    await store.close()


# --- work and places ---


async def place_of(store: JobStore, job_id: str) -> Place | None:
    found = await store.look(job_id)
    if found is None:
        return None
    assert found[0] == await store.get(job_id)
    return found[1]


async def test_work_follows_the_jobs(store: JobStore, lane: int) -> None:
    async def of(tier: Tier) -> Work:
        return (await store.load(lane)).work[tier]

    first = await submitted(store, lane)
    await submitted(store, lane, cost_tokens=30)
    await submitted(store, lane, tier=Tier.BULK, cost_tokens=5)  # less than it asks to draw: all of it is output
    assert await of(Tier.STANDARD) == Work(2 + 22, 2 * OUTPUT)
    assert await of(Tier.BULK) == Work(0, 5)
    claim = await claimed(store, lane)
    assert claim.job.id == first
    assert await of(Tier.STANDARD) == Work(22, OUTPUT)
    await store.publish(lane, [publication(claim, delta("abc", 1, 2, 3))])
    assert await store.release(claim.hold, reason="hand_over")
    assert await of(Tier.STANDARD) == Work(2 + 3 + 22, OUTPUT - 3 + OUTPUT)  # the three are to be computed again
    await store.cancel(first)
    assert await of(Tier.STANDARD) == Work(22, OUTPUT)


async def test_only_those_that_wait_for_a_time_are_delayed(store: JobStore, lane: int) -> None:
    await submitted(store, lane)
    claim = await claimed(store, lane)
    assert await store.release(claim.hold, reason="retry", delay_seconds=0.03)
    await submitted(store, lane)
    load = await store.load(lane)
    assert (load.num_waiting, load.delayed, load.running) == (2, 1, 0)
    await lapse()
    load = await store.load(lane)
    assert (load.num_waiting, load.delayed) == (2, 0)
    await claimed(store, lane)
    load = await store.load(lane)
    assert (load.num_waiting, load.delayed, load.running) == (1, 0, 1)


async def test_a_place_counts_the_first_ahead_and_averages_the_rest(store: JobStore, lane: int) -> None:
    num = PLACE_LOOKS + 10
    ids = [await submitted(store, lane, cost_tokens=10 + index) for index in range(num)]
    await submitted(store, lane, tier=Tier.INTERACTIVE)
    for index in (0, 1, PLACE_LOOKS):
        place = await place_of(store, ids[index])
        assert place is not None and place.position == index
        assert place.ahead == Work(sum(2 + one for one in range(index)), OUTPUT * index)  # exact
    place = await place_of(store, ids[-1])
    assert place is not None and place.position == num - 1
    exact = sum(2 + one for one in range(num - 1))
    assert abs(place.ahead.prompt_tokens - exact) / exact < 0.01 and place.ahead.output_tokens == OUTPUT * (num - 1)
    assert place.running == 0
    await claimed(store, lane)
    place = await place_of(store, ids[-1])
    assert place is not None and place.running == 1
    claim = await claimed(store, lane)
    assert await place_of(store, claim.job.id) is None
    assert await place_of(store, "job-1-unknown0") is None


# --- sizes ---


async def finish(
    store: JobStore, lane: int, *, output: int, prompt: int = 4, status: Status = Status.SUCCEEDED
) -> None:
    job = new_job(lane, cost_tokens=prompt // 2 + OUTPUT)  # the prompt turns out to be twice as long as thought
    assert await store.submit(job)
    claim = await claimed(store, lane)
    usage = Usage(prompt_tokens=prompt, completion_tokens=output, cached_tokens=prompt // 2)
    assert await store.commit(claim.hold, Outcome(status=status, usage=usage))


async def test_sizes_are_those_of_jobs_that_succeeded(store: JobStore, lane: int) -> None:
    for output in (8, 4, 6):
        await finish(store, lane, output=output)
    await finish(store, lane, output=1, status=Status.FAILED)
    await store.cancel(await submitted(store, lane))
    sizes = (await store.load(lane)).sizes
    assert sizes == Sizes(3, 12, 6, 18, 24, 64 + 16 + 36, 8 * 18, 3 * 64, 3 * 2)
    assert (sizes.output_share, sizes.cached_share, sizes.prompt_share, sizes.mean) == (0.75, 0.5, 2.0, Work(2, 8))
    assert sizes.expected(Work(100, 100)) == Work(100, 75)
    assert sizes.spread == pytest.approx((2 * 2 + 2 * 2) / (3 * 6 * 6))


async def test_newer_sizes_count_more(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    from infra.jobs import RedisJobs
    from infra.memory import MemoryJobs

    monkeypatch.setattr(work, "MAX_JOBS", 4)
    found: list[LaneLoad] = []
    stores: list[JobStore] = [MemoryJobs(), await RedisJobs.connect(redis_url, settings=QueueSettings())]
    for store in stores:
        lane = await store.open_lane(ALIAS)
        for output in (1, 2, 3, 1, 8, 8, 8, 7):
            await finish(store, lane, output=output, prompt=5)
        found.append(await store.load(lane))
        await store.close()
    assert found[0].sizes == found[1].sizes
    assert found[0].sizes.jobs <= 4 and found[0].sizes.output / found[0].sizes.jobs > 5  # of all: 4.75


def test_what_is_left_of_a_job() -> None:
    assert work_left(10, 8, 0) == Work(2, 8)
    assert work_left(10, 8, 5) == Work(7, 3)
    assert work_left(10, 8, 9) == Work(10, 0)
    assert work_left(5, 8, 0) == Work(0, 5)
    assert Sizes().spread == 0 and Sizes().output_share == 1 and Sizes().mean is None


# --- who is waited for ---


async def watched(store: JobStore, lane: int, watch_ms: int) -> NewJob:
    job = new_job(lane)
    job.watch_ms = watch_ms
    assert await store.submit(job)
    return job


async def status_of(store: JobStore, job_id: str) -> Status:
    job = await store.get(job_id)
    assert job is not None
    return job.status


async def test_whom_nobody_watches_any_more_is_cancelled(store: JobStore, lane: int) -> None:
    running = await watched(store, lane, ENOUGH_MS)
    claim = await claimed(store, lane)
    await store.publish(lane, [publication(claim, delta("ab", 1, 2))])
    queued, kept, free = [await watched(store, lane, ms) for ms in (ENOUGH_MS,) * 3]
    unwatched = await submitted(store, lane)
    await store.watch(lane, [kept.id], seconds=60)
    await store.watch(lane, [free.id], seconds=None)
    assert (await store.sweep(lane)).cancelled == []
    await asyncio.sleep(1.2 * ENOUGH_MS / 1000)
    assert set((await store.sweep(lane)).cancelled) == {running.id, queued.id}
    job = await store.get(running.id)
    assert job is not None and job.status is Status.CANCELLED and job.outcome is not None
    assert job.outcome.result is not None and job.outcome.result.choices[0].token_ids == [1, 2]
    assert not await store.commit(claim.hold, success())
    for job_id in (kept.id, free.id, unwatched):
        assert await status_of(store, job_id) is Status.QUEUED
    assert (await store.sweep(lane)).cancelled == []


async def test_an_ended_job_is_watched_no_more(store: JobStore, lane: int) -> None:
    job = await watched(store, lane, 20)
    claim = await claimed(store, lane)
    assert await store.commit(claim.hold, success())
    await store.watch(lane, [job.id, "job-1-unknown0"], seconds=0.02)
    await lapse()
    assert (await store.sweep(lane)).cancelled == []
    assert await status_of(store, job.id) is Status.SUCCEEDED


async def test_a_watch_renewed_during_a_sweep_holds(store: JobStore, lane: int) -> None:
    """Whatever the order of the two, the job is cancelled or watched, and a sweep says which."""
    for _ in range(20):
        job = await watched(store, lane, 0)
        await asyncio.sleep(0.002)
        sweep, _ = await asyncio.gather(store.sweep(lane), store.watch(lane, [job.id], seconds=60))
        is_cancelled = await status_of(store, job.id) is Status.CANCELLED
        assert sweep.cancelled == ([job.id] if is_cancelled else [])


# --- many logs at once ---


async def test_many_logs_are_read_at_once(store: JobStore, lane: int) -> None:
    ids = [await submitted(store, lane) for _ in range(3)]
    claim = await claimed(store, lane)
    await store.publish(lane, [publication(claim, *(delta(str(number), number) for number in range(5)))])
    found = await store.read_logs(lane, {ids[0]: 1, ids[1]: -1, ids[2]: 0, "job-1-unknown0": -1}, limit=3)
    assert [event.sequence_number for event in found[ids[0]]] == [2, 3, 4]
    assert found[ids[0]] == await store.events(ids[0], after=1, limit=3)
    assert [event.type for event in found[ids[1]]] == ["job.queued"]
    assert found[ids[2]] == []
    assert "job-1-unknown0" not in found
    assert await store.read_logs(lane, {}, limit=3) == {}


@pytest.mark.parametrize("backend", ["memory", "redis"])
async def test_a_log_that_has_expired_is_left_out(backend: str, request: pytest.FixtureRequest) -> None:
    from infra.jobs import RedisJobs
    from infra.memory import MemoryJobs

    settings = QueueSettings(event_log_seconds=0.03)
    store: JobStore
    if backend == "memory":
        store = MemoryJobs(settings=settings)
    else:
        store = await RedisJobs.connect(request.getfixturevalue("redis_url"), settings=settings)
    lane = await store.open_lane(ALIAS)
    job_id = await submitted(store, lane)
    claim = await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE)
    assert claim is not None and await store.commit(claim.hold, success())
    await lapse()
    assert await store.read_logs(lane, {job_id: 0}, limit=10) == {}
    assert await store.read_logs(lane, {job_id: 2}, limit=10) == {job_id: []}  # whoever has all of it misses nothing
    await store.close()
