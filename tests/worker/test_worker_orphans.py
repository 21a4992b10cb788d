"""Orphaned blobs go, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.blobs import Blobs, open_blobs
from infra.contracts import Outcome, Result
from infra.keys import new_job_id
from infra.states import Status
from infra.store import JobStore
from tests.infra.jobs_for_tests import ALIAS, claimed, submitted
from worker.orphans import delete_orphans


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return open_blobs((tmp_path / "blobs").as_uri())


def keys_in(blobs: Blobs) -> set[str]:
    return {entry.key for entry in blobs.list()}


async def test_what_no_record_names_goes_and_the_rest_stays(store: JobStore, blobs: Blobs) -> None:
    lane = await store.open_lane(ALIAS)
    ended = await submitted(store, lane)
    claim = await claimed(store, lane)
    named = f"results/{ended}/1"
    outcome = Outcome(status=Status.SUCCEEDED, result=Result(blob=named))
    assert await store.commit(claim.hold, outcome)
    running = await submitted(store, lane)
    await claimed(store, lane)
    queued, gone = await submitted(store, lane), new_job_id(lane)
    kept = {
        named, f"specs/{ended}", f"specs/{queued}", f"results/{running}/1",
        "runs/run-1/output.jsonl", "tokenizers/abc.json", "specs/not-a-job",
    }  # fmt: skip
    orphans = {f"specs/{gone}", f"results/{gone}/1", f"results/{ended}/2", f"results/{running}/7"}
    for key in kept | orphans:
        blobs.put(key, b"data")
    assert await delete_orphans(store, blobs) == 0  # all are young: their submits and commits may be on the way
    assert keys_in(blobs) == kept | orphans
    assert await delete_orphans(store, blobs, age_seconds=-1.0) == len(orphans)
    assert keys_in(blobs) == kept
