"""A pool wakes with work, stays up while there is any, and sleeps behind jobs that are over: KEDA's rule, read from the
rendered triggers, over a real store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis

from infra.contracts import JobSpec, Kind, NewJob, Outcome, Tier
from infra.jobs import RedisJobs
from infra.keys import new_job_id
from infra.states import Status
from tests.chart.chart_render import Helm, find

ALIAS = "smollm2-135m"


@pytest.fixture
async def jobs(redis_url: str) -> AsyncIterator[RedisJobs]:
    opened = await RedisJobs.connect(redis_url)
    yield opened
    await opened.close()


def _is_awake(helm: Helm, redis_url: str) -> bool:
    """Whether KEDA would hold a worker for the streams alone, the gateway being away: any length above the activation
    value, which is 0 unless the trigger says otherwise."""
    scaled = find(helm.template(), "ScaledObject", "-worker-default")
    triggers = [one["metadata"] for one in scaled["spec"]["triggers"] if one["type"] == "redis-streams"]
    assert len(triggers) == len(Tier)
    with redis.Redis.from_url(redis_url) as server:
        return any(server.xlen(one["stream"]) > int(one.get("activationLagCount", 0)) for one in triggers)


async def _submit(jobs: RedisJobs, tier: Tier = Tier.STANDARD) -> str:
    lane = await jobs.open_lane(ALIAS)
    job_id = new_job_id(lane)
    spec = JobSpec(model=ALIAS, kind=Kind.GENERATE, prompt="hello", params={})
    assert await jobs.submit(NewJob(id=job_id, spec=spec, tier=tier, cost_tokens=8))
    return job_id


@pytest.mark.parametrize("tier", Tier)
async def test_one_queued_job_wakes_it(newest_helm: Helm, redis_url: str, jobs: RedisJobs, tier: Tier) -> None:
    assert not _is_awake(newest_helm, redis_url)
    await _submit(jobs, tier)
    assert _is_awake(newest_helm, redis_url)


async def test_a_running_job_keeps_it_awake(newest_helm: Helm, redis_url: str, jobs: RedisJobs) -> None:
    await _submit(jobs)
    claim = await jobs.claim(1, "w", free_tokens=None, lease_seconds=30)
    assert claim is not None
    assert _is_awake(newest_helm, redis_url)
    assert await jobs.commit(claim.hold, Outcome(status=Status.SUCCEEDED))
    assert not _is_awake(newest_helm, redis_url)


async def test_cancelled_jobs_let_it_sleep(newest_helm: Helm, redis_url: str, jobs: RedisJobs) -> None:
    for _ in range(3):
        await jobs.cancel(await _submit(jobs))
    running = await _submit(jobs)
    assert await jobs.claim(1, "w", free_tokens=None, lease_seconds=30) is not None
    assert _is_awake(newest_helm, redis_url)
    await jobs.cancel(running)
    assert not _is_awake(newest_helm, redis_url)


async def test_a_delayed_retry_keeps_it_awake(newest_helm: Helm, redis_url: str, jobs: RedisJobs) -> None:
    await _submit(jobs)
    claim = await jobs.claim(1, "w", free_tokens=None, lease_seconds=30)
    assert claim is not None
    assert await jobs.release(claim.hold, reason="retry", delay_seconds=3600)
    assert _is_awake(newest_helm, redis_url)


async def test_the_default_pool_watches_the_lane_of_its_alias(
    newest_helm: Helm, redis_url: str, jobs: RedisJobs
) -> None:
    """The first alias of an empty store gets lane 1, which the values give to the default pool."""
    assert await jobs.open_lane(ALIAS) == 1
    assert await jobs.open_lane("another") != 1
