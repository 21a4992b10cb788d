"""bartleby #233, langchain #3694: a long document with one chunk over the context is cut in silence, or never joined.

Kind: text that does not fit. Every byte of the document is in exactly one chunk that fits, whatever its words are; a
chunk that fails is named with its bytes; joining ends after as few levels as the fan-in allows.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.contracts import Claim, JobError, Outcome
from infra.runs import SummaryParams, document_blob, report_of
from infra.states import Status
from infra.store import JobStore
from tests.runs.run_aids import MODEL, World, new_run, serve_model, summary, words, world_over

CONTEXT, LONG_CONTEXT = 512, 4096  # a short one lowers the fan-in
NUM_SENTENCES, NUM_CHUNKS, FAN_IN, DEPTH = 120, 60, 8, 2  # 60 summaries are joined to 8, and those to one
PARAMS = SummaryParams(model=MODEL, target_tokens=16, chunk_tokens=64, fan_in=FAN_IN)


@pytest.fixture
async def world(store: JobStore, store_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with world_over(store, store_url, tmp_path, window=16) as world:
        yield world


def fitting(claim: Claim) -> Outcome:
    """The usual answer, to a job that fits the shorter context."""
    assert claim.job.cost_tokens <= CONTEXT
    return summary(claim)


def depth(world: World) -> int:
    """Levels of joining that were asked for."""
    levels = [name.partition(":reduce-")[2].partition("-")[0] for name in world.worker.items if ":reduce-" in name]
    return max(map(int, levels))


@pytest.mark.parametrize("word", ["x" * 4000, "漢" * 1500, "👩‍👧" * 400, "á" * 1500])
async def test_a_word_longer_than_the_context_is_cut_between_characters(world: World, word: str) -> None:
    world.worker.answer = fitting
    text = words(20) + " " + word + " " + words(200)
    run = new_run(world.blobs, text, params=PARAMS)
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    assert view.status is Status.SUCCEEDED and view.counts.coverage == 1.0
    (line,) = world.output(view)
    data = world.blobs.get(document_blob(run.id, 0))
    chunks = line["chunks"]
    assert isinstance(chunks, list) and len(chunks) >= 20
    pieces = [data[one["start"] : one["end"]] for one in chunks]
    assert b"".join(pieces) == data
    for index, piece in enumerate(pieces):
        assert world.worker.prompts[f"0:map-{index}"].endswith(piece.decode())  # also: whole characters
    assert depth(world) <= math.ceil(math.log2(len(chunks)))


async def test_the_one_chunk_that_does_not_fit_is_named(world: World, tmp_path: Path) -> None:
    """The worker that got it has a shorter context than the card said."""
    await serve_model(world.store, world.blobs, tmp_path, max_model_len=LONG_CONTEXT)

    def refusing(claim: Claim) -> Outcome:
        if claim.job.spec.run_item is not None and claim.job.spec.run_item.item_id == "0:map-17":
            return Outcome(
                status=Status.FAILED, error=JobError(code="context_length_exceeded", message="512 tokens are too many")
            )
        return summary(claim)

    text = words(NUM_SENTENCES)
    world.worker.answer = refusing
    run = new_run(world.blobs, text, params=PARAMS)
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    assert view.status is Status.SUCCEEDED
    num_chunks = view.counts.chunks
    assert num_chunks == NUM_CHUNKS
    assert (view.counts.chunks_done, view.counts.chunks_failed) == (num_chunks - 1, 1)
    (failed,) = report_of(view).failures
    assert (failed.item, failed.error.code) == ("map-17", "context_length_exceeded")
    (line,) = world.output(view)
    assert isinstance(line["chunks"], list)
    lost = next(one for one in line["chunks"] if one["status"] == "failed")
    assert (lost["start"], lost["end"]) == (failed.start, failed.end)
    assert line["bytes_summarized"] == len(text.encode()) - (failed.end - failed.start)
    assert view.counts.coverage is not None and view.counts.coverage < 1
    assert depth(world) == DEPTH
    assert set(world.worker.items.values()) == {1}
