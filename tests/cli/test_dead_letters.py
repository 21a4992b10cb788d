"""`millstream dead-letters`: what was taken for poison is listed, and made a new job of, once."""

from __future__ import annotations

import asyncio

import pytest

from infra.contracts import JobSpec, Kind, NewJob, RunItem
from infra.jobs import RedisJobs
from infra.keys import new_job_id
from infra.losses import MAX_STUCK_COUNT
from infra.states import Status
from millstream.cli import main


async def dead_letter(url: str, **spec: object) -> str:
    store = await RedisJobs.connect(url)
    lane = await store.open_lane("fake")
    job_id = new_job_id(lane)
    asked = JobSpec(model="fake", kind=Kind.GENERATE, prompt="kills", params={"seed": 7}, **spec)  # type: ignore[arg-type]
    await store.submit(NewJob(id=job_id, spec=asked, tenant="me", cost_tokens=9))
    for number in range(MAX_STUCK_COUNT):
        claim = await store.claim(lane, f"worker-{number}", free_tokens=None, lease_seconds=0.001)
        assert claim is not None and claim.job.id == job_id
        await asyncio.sleep(0.01)
    swept = await store.sweep(lane)
    assert swept.failed == [job_id]
    await store.close()
    return job_id


async def record(url: str, job_id: str) -> object:
    store = await RedisJobs.connect(url)
    try:
        return await store.get(job_id)
    finally:
        await store.close()


@pytest.fixture(autouse=True)
def of_this_store(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_REDIS_URL", redis_url)


def test_listed_and_requeued_once(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    job_id = asyncio.run(dead_letter(redis_url))
    assert main(["dead-letters"]) == 0
    assert capsys.readouterr().out.split("\t")[0] == job_id
    assert main(["dead-letters", "requeue", job_id]) == 0
    first = capsys.readouterr().out.split()
    assert main(["dead-letters", "requeue", "--all"]) == 0
    assert capsys.readouterr().out.split() == first
    again = asyncio.run(record(redis_url, first[1]))
    assert again is not None
    assert (again.status, again.retry_of, again.attempt) == (Status.QUEUED, job_id, 0)  # type: ignore[attr-defined]
    assert (again.spec.prompt, again.spec.params, again.tenant) == ("kills", {"seed": 7}, "me")  # type: ignore[attr-defined]


def test_what_is_no_dead_letter_is_refused(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    of_run = asyncio.run(dead_letter(redis_url, run_item=RunItem(run_id="run-1", item_id="0:map-0")))
    assert main(["dead-letters", "requeue", of_run, "job-1-00000000"]) == 1
    said = capsys.readouterr()
    assert "belongs to run run-1" in said.err and "is no dead letter" in said.err
    assert not said.out


@pytest.mark.parametrize("arguments", [["requeue"], ["list", "job-1-00000000"], ["list", "--all"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert main(["dead-letters", *arguments]) == 2
