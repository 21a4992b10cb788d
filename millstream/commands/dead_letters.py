"""`millstream dead-letters`"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from infra.contracts import Job, NewJob
from infra.errors import Conflict
from infra.jobs import RedisJobs
from infra.keys import lane_of, new_job_id
from infra.settings import QueueSettings, StoreSettings
from infra.store import JobStore
from millstream.errors import UsageError
from millstream.flags import from_environment
from millstream.stack.address import joining


def dead_letters(
    action: Literal["list", "requeue"] = "list",
    job_ids: list[str] | None = None,
    *,
    all: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Jobs that failed because workers died while they ran them: lists them, or makes new jobs of them.

    Parameters
    ----------
    action
        What to do.
    job_ids
        The dead letters to requeue.
    all
        Requeue every dead letter.
    """
    if (action == "requeue") != bool(job_ids or all):
        raise UsageError("requeue needs the ids of dead letters, or --all; list takes neither")
    return asyncio.run(_serve(action, job_ids or [], all))


async def _serve(action: str, job_ids: list[str], requeues_all: bool) -> int:
    settings = joining(from_environment(StoreSettings))
    queue = from_environment(QueueSettings)
    store = await RedisJobs.connect(settings.server_url, settings=queue, kept=settings)
    try:
        if action == "list":
            for job in await dead_jobs(store):
                code = job.outcome.error.code if job.outcome and job.outcome.error else ""
                print(job.id, job.spec.model, job.tier, f"lost={job.lost_count}", code, sep="\t")
            return 0
        failures = 0
        for job_id in [job.id for job in await dead_jobs(store)] if requeues_all else job_ids:
            try:
                print(job_id, await requeue(store, job_id), sep="\t")
            except Conflict as error:
                print(f"millstream: {error}", file=sys.stderr)
                failures += 1
        return 1 if failures else 0
    finally:
        await store.close()


async def dead_jobs(store: JobStore) -> list[Job]:
    """The dead letters of every lane whose records are still there; each lane's newest first."""
    found = [await store.get(job_id) for lane in await store.lanes() for job_id in await store.dead_letters(lane)]
    return [job for job in found if job is not None]


async def requeue(store: JobStore, job_id: str) -> str:
    """The id of a new job that asks for the same. The same id each time, so repeating it makes no second one.

    A child of a run is not fed again: its run has counted it as failed. Limits in time are not repeated.
    Raises Conflict where the job is no dead letter.
    """
    lane = lane_of(job_id)
    job = await store.get(job_id)
    if job is None or job_id not in await store.dead_letters(lane):
        raise Conflict(f"{job_id} is no dead letter; see `millstream dead-letters list`")
    if job.spec.run_item is not None:
        raise Conflict(f"{job_id} belongs to run {job.spec.run_item.run_id}, which has counted it; start the run anew")
    again = NewJob(
        id=new_job_id(lane, job_id.rsplit("-", 1)[1][:60] + "dead"),
        spec=job.spec,
        tier=job.tier,
        priority=job.priority,
        tenant=job.tenant,
        cost_tokens=job.cost_tokens,
        attempt_timeout_ms=job.attempt_timeout_ms,
        retry_of=job_id,
    )
    await store.submit(again)
    return again.id
