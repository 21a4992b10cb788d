"""Blobs that nobody names any more: of submits that broke off, of attempts that lost, of jobs whose records are gone.

    specs/<job id>              kept while the job's record is there
    results/<job id>/<attempt>  kept while the record names it, or while that attempt may still come to name it

Young blobs are left alone: theirs may be a submit or a commit on its way. All other blobs are not ours to judge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import islice

from infra.blobs import BlobEntry, Blobs
from infra.contracts import Job
from infra.errors import UnknownJob
from infra.states import TERMINAL
from infra.store import JobStore

AGE_SECONDS = 24 * 3600.0
PAGE = 200
PREFIXES = ("specs/", "results/")


async def delete_orphans(store: JobStore, blobs: Blobs, *, age_seconds: float = AGE_SECONDS) -> int:
    """Deletes what is orphaned and older than `age_seconds`; returns how many. Safe to run from many processes at once.

    Raises StoreUnavailable or BlobUnavailable; what is left then, the next call finds.
    """
    oldest_kept = time.time() - age_seconds
    count = 0
    for prefix in PREFIXES:
        entries = blobs.list(prefix)
        while page := await asyncio.to_thread(_page, entries):
            for entry in page:
                if entry.modified_at < oldest_kept and await _is_orphan(store, entry.key):
                    await asyncio.to_thread(blobs.delete, entry.key)
                    count += 1
    return count


def _page(entries: Iterator[BlobEntry]) -> list[BlobEntry]:
    return list(islice(entries, PAGE))


async def _is_orphan(store: JobStore, key: str) -> bool:
    kind, job_id, *rest = key.split("/")
    try:
        job = await store.get(job_id)
    except UnknownJob:
        return False  # no job's name: not ours
    if job is None:
        return True
    return kind == "results" and not _may_be_named(job, key, rest)


def _may_be_named(job: Job, key: str, rest: list[str]) -> bool:
    if job.status in TERMINAL:
        return job.outcome is not None and job.outcome.result is not None and job.outcome.result.blob == key
    return rest == [str(job.attempt)]
