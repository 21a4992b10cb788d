"""The steps over both stores: whatever comes twice, late or not at all, each item is asked once and the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.contracts import Choice, Claim, Job, Outcome, Result
from infra.errors import UnknownModel
from infra.runs import DocumentSource, Style, SummaryParams, document_blob, report_of
from infra.states import Status
from infra.store import JobStore
from tests.runs.run_aids import (
    MODEL,
    USAGE,
    World,
    failure,
    new_run,
    summary,
    words,
    world_over,
)
from worker.runs import progress

WINDOW = 4
BLANK = Choice(index=0, text=" \n", token_ids=[], finish_reason="stop")


@pytest.fixture
async def world(store: JobStore, store_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with world_over(store, store_url, tmp_path, window=WINDOW) as world:
        yield world


async def in_flight_jobs(world: World, run_id: str) -> list[Job]:
    found = []
    for document in await world.runs.documents(run_id, range(20)):
        for job_id in progress.fed_items(document.state).values():
            job = await world.store.get(job_id)
            assert job is not None
            found.append(job)
    return found


async def test_documents_of_every_length_are_summarized(world: World) -> None:
    run = new_run(world.blobs, words(2), words(60), "北京的春天来了。😺" * 40, words(12))
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    assert view.status is Status.SUCCEEDED
    assert [one.status for one in view.documents] == [Status.SUCCEEDED] * 4
    assert view.documents[0].num_chunks == 1 and view.documents[0].summary == "summary of 0:map-0"
    assert view.documents[1].num_chunks is not None and view.documents[1].num_chunks > 9
    counts = view.counts
    assert counts.coverage == 1.0 and counts.bytes == sum(one.num_bytes or 0 for one in view.documents)
    assert counts.chunks == counts.chunks_done and counts.chunks_failed == 0
    assert set(world.worker.items.values()) == {1}
    assert counts.usage.prompt_tokens == USAGE.prompt_tokens * len(world.worker.items)
    assert world.worker.most_waiting <= WINDOW
    report = report_of(view)
    assert report.coverage == 1.0 and report.failures == [] and report.document_errors == {}

    lines = world.output(view)
    assert [line["id"] for line in lines] == ["doc-0", "doc-1", "doc-2", "doc-3"]
    assert [line["summary"] for line in lines] == [one.summary for one in view.documents]
    data = world.blobs.get(document_blob(run.id, 1))
    chunks = lines[1]["chunks"]
    assert isinstance(chunks, list) and b"".join(data[one["start"] : one["end"]] for one in chunks) == data
    assert all(one["status"] == "done" and one["summary"].startswith("summary of 1:map-") for one in chunks)


async def test_the_prompts_hold_the_document_and_the_summaries(world: World) -> None:
    text = words(20)
    run = new_run(world.blobs, text)
    await world.runs.create(run)
    await world.bring_to_end(run.id)
    (document,) = await world.runs.documents(run.id, [0])
    for index, chunk in enumerate(document.state.chunks or []):
        assert world.worker.prompts[f"0:map-{index}"].endswith(text.encode()[chunk.start : chunk.end].decode())
    tree = progress.tree_for(document.state)
    for item, joined in tree.children.items():
        if joined:
            prompt = world.worker.prompts[f"0:{item}"]
            assert prompt.endswith("\n\n".join(f"summary of 0:{child}" for child in joined))


async def test_jobs_are_what_the_run_asked_for(world: World) -> None:
    params = SummaryParams(model=MODEL, style=Style.HEADLINE, target_tokens=9, chunk_tokens=64)
    run = new_run(world.blobs, words(2), words(30), params=params, tenant="acme", salt="pepper", priority=3)
    await world.runs.create(run)
    await world.steps.advance(run.id)
    await world.split_all()
    jobs = await in_flight_jobs(world, run.id)
    assert len(jobs) == WINDOW
    for job in jobs:
        assert (job.tier, job.tenant, job.priority, job.spec.salt, job.spec.model) == (
            "bulk",
            "acme",
            3,
            "pepper",
            MODEL,
        )
        assert job.spec.params["temperature"] == 0.0 and job.spec.params["seed"] is not None
        assert 0 < job.cost_tokens <= 512
    # The document of one chunk is asked for its headline directly; a part's summary is longer than a headline.
    assert [job.spec.params["max_tokens"] for job in jobs] == [9, 64, 64, 64]
    view = await world.runs.get(run.id)
    assert view is not None and view.documents[0].streaming_job_id == jobs[0].id
    assert view.documents[1].streaming_job_id is None


async def test_an_empty_document_is_an_error_of_its_own(world: World) -> None:
    run = new_run(world.blobs, words(2), "", words(2))
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    assert view.status is Status.SUCCEEDED
    assert [one.status for one in view.documents] == [Status.SUCCEEDED, Status.FAILED, Status.SUCCEEDED]
    error = view.documents[1].error
    assert error is not None and error.code == "empty_document" and "doc-1.txt is empty" in error.message
    assert view.counts.coverage == 1.0
    assert report_of(view).document_errors == {"doc-1": error}
    assert [line["status"] for line in world.output(view)] == ["succeeded", "failed", "succeeded"]


async def test_a_run_without_any_summary_has_failed(world: World) -> None:
    run = new_run(world.blobs, "", " \n ")
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    assert view.status is Status.FAILED and view.header.error is not None
    assert view.header.error.code == "no_summary" and view.counts.documents_failed == 2


async def test_failed_chunks_are_named_and_the_rest_is_summarized(world: World) -> None:
    world.worker.answer = lambda claim: (
        failure(claim) if claim.job.spec.run_item and claim.job.spec.run_item.item_id == "0:map-2" else summary(claim)
    )
    run = new_run(world.blobs, words(30), words(2))
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    first = view.documents[0]
    assert (view.status, first.status, first.num_chunks_failed) == (Status.SUCCEEDED, Status.SUCCEEDED, 1)
    (document,) = await world.runs.documents(run.id, [0])
    chunk = (document.state.chunks or [])[2]
    (failed,) = report_of(view).failures
    assert (failed.document_id, failed.item, failed.start, failed.end) == ("doc-0", "map-2", chunk.own_start, chunk.end)
    assert failed.error.code == "engine_error"
    missing = chunk.end - chunk.own_start
    assert first.num_bytes is not None and first.num_bytes_summarized == first.num_bytes - missing
    assert view.counts.coverage is not None and view.counts.coverage < 1
    assert set(world.worker.items.values()) == {1}
    assert "summary of 0:map-2" not in "".join(world.worker.prompts.values())


async def test_a_document_all_of_whose_chunks_fail_fails_alone(world: World) -> None:
    world.worker.answer = lambda claim: (
        failure(claim)
        if claim.job.spec.run_item and claim.job.spec.run_item.item_id.startswith("0:")
        else summary(claim)
    )
    run = new_run(world.blobs, words(30), words(2))
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    assert [one.status for one in view.documents] == [Status.FAILED, Status.SUCCEEDED]
    assert view.documents[0].error is not None and "the forward broke" in view.documents[0].error.message
    assert not any("reduce" in item for item in world.worker.items)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(Outcome(status=Status.EXPIRED), "expired"),
     (Outcome(status=Status.SUCCEEDED, result=Result()), "empty_summary"),
     (Outcome(status=Status.SUCCEEDED, result=Result(choices=[BLANK])), "empty_summary"),
     (Outcome(status=Status.SUCCEEDED, result=Result(blob="results/gone")), "blob_not_found")],
)  # fmt: skip
async def test_a_job_that_ends_without_a_text_is_a_failure(world: World, outcome: Outcome, code: str) -> None:
    world.worker.answer = lambda claim: outcome
    run = new_run(world.blobs, words(2))
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    (failed,) = view.documents[0].failures
    assert (view.status, failed.error.code) == (Status.FAILED, code)


async def test_a_large_result_is_read_from_its_blob(world: World) -> None:
    from infra.contracts import pack

    def large(claim: Claim) -> Outcome:
        result = Result(choices=[Choice(index=0, text="from the blob", token_ids=[], finish_reason="length")])
        world.blobs.put("results/large", pack(result))
        return Outcome(status=Status.SUCCEEDED, result=Result(blob="results/large"), usage=USAGE)

    world.worker.answer = large
    run = new_run(world.blobs, words(2))
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    assert view.documents[0].summary == "from the blob"
    chunks = world.output(view)[0]["chunks"]
    assert isinstance(chunks, list) and chunks[0]["cut"] is True


async def test_steps_that_come_many_times_ask_each_item_once(world: World) -> None:
    run = new_run(world.blobs, words(30), words(2), words(20))
    await world.runs.create(run)
    for _ in range(100):
        splits, world.splits[:] = list(world.splits), []
        await asyncio.gather(
            *(world.steps.advance(run.id) for _ in range(5)),
            *(world.steps.split(*split) for split in splits for _ in range(3)),
        )
        await world.worker.work_once()
        view = await world.runs.get(run.id)
        assert view is not None
        if view.header.is_finished:
            break
    assert view.status is Status.SUCCEEDED and view.counts.coverage == 1.0
    assert set(world.worker.items.values()) == {1} and set(world.worker.jobs.values()) == {1}
    assert world.worker.most_waiting <= WINDOW
    before = view
    await asyncio.gather(*(world.steps.advance(run.id) for _ in range(3)), world.steps.split(run.id, 0))
    after = await world.runs.get(run.id)
    assert after == before
    assert await world.worker.work_once() == 0


async def test_a_step_that_died_between_marking_and_submitting_is_made_good(world: World) -> None:
    run = new_run(world.blobs, words(2))
    await world.runs.create(run)
    await world.steps.advance(run.id)
    submit = world.store.submit

    async def dies(*_: object, **__: object) -> bool:
        raise ConnectionError("killed here")

    world.store.submit = dies  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await world.split_all()
    assert await world.runs.in_flight(run.id) == [(0, "map-0")]
    assert await world.worker.work_once() == 0
    world.store.submit = submit  # type: ignore[method-assign]
    view = await world.bring_to_end(run.id)
    assert view.status is Status.SUCCEEDED and world.worker.items == {"0:map-0": 1}


async def test_a_split_that_was_lost_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(world.blobs, words(2))
    await world.runs.create(run)
    await world.steps.advance(run.id)
    world.splits.clear()  # lost on its way
    await world.steps.advance(run.id)
    assert world.splits == []  # it may still come
    monkeypatch.setattr("worker.runs.steps.SPLIT_AGAIN_SECONDS", 0.0)
    await world.steps.advance(run.id)
    assert world.splits == [(run.id, 0)]
    assert (await world.bring_to_end(run.id)).status is Status.SUCCEEDED


async def test_notices_are_deleted_by_the_step_and_not_before(world: World) -> None:
    run = new_run(world.blobs, words(2))
    await world.runs.create(run)
    await world.steps.advance(run.id)
    await world.split_all()
    await world.worker.work_once()
    (lane,) = await world.store.lanes(MODEL)
    (notice,) = await world.store.take_notices(lane, limit=10, hide_seconds=0)
    assert notice.topic == "run" and notice.run_item is not None and notice.run_item.run_id == run.id
    (again,) = await world.store.take_notices(lane, limit=10, hide_seconds=0)
    await world.steps.advance(run.id, [again])
    assert await world.store.take_notices(lane, limit=10, hide_seconds=0) == []
    await world.steps.advance(run.id, [again])  # delivered twice
    view = await world.runs.get(run.id)
    assert view is not None and view.status is Status.SUCCEEDED


async def test_a_notice_of_a_run_that_is_gone_is_deleted(world: World) -> None:
    run = new_run(world.blobs, words(2))
    await world.runs.create(run)
    await world.steps.advance(run.id)
    await world.split_all()
    await world.worker.work_once()
    (lane,) = await world.store.lanes(MODEL)
    notices = await world.store.take_notices(lane, limit=10, hide_seconds=0)
    await world.steps.advance("run-00000000", notices)
    assert await world.store.take_notices(lane, limit=10, hide_seconds=0) == []


async def test_cancelling_a_run_cancels_its_jobs(world: World) -> None:
    run = new_run(world.blobs, words(30), words(30))
    await world.runs.create(run)
    await world.steps.advance(run.id)
    await world.split_all()
    jobs = await in_flight_jobs(world, run.id)
    assert len(jobs) == WINDOW
    view = await world.runs.cancel(run.id)
    assert view is not None and view.status is Status.CANCELLED
    await world.steps.advance(run.id)
    ends = [await world.store.get(job.id) for job in jobs]
    assert {job.status for job in ends if job is not None} == {Status.CANCELLED}
    assert await world.runs.in_flight(run.id) == []
    assert await world.worker.work_once() == 0
    await world.steps.advance(run.id)
    await world.steps.split(run.id, 1)
    assert await world.worker.work_once() == 0


async def test_a_run_cancelled_while_jobs_are_submitted_leaves_none(world: World) -> None:
    run = new_run(world.blobs, words(30))
    await world.runs.create(run)
    await world.steps.advance(run.id)
    submit = world.store.submit

    async def cancels_first(*args: object, **kwargs: object) -> bool:
        await world.runs.cancel(run.id)
        return await submit(*args, **kwargs)  # type: ignore[arg-type]

    world.store.submit = cancels_first  # type: ignore[method-assign]
    await world.split_all()
    assert await world.worker.work_once() == 0
    assert await world.runs.in_flight(run.id) == []


async def test_a_deadline_ends_the_run(world: World) -> None:
    deadline_ms = await world.runs.now_ms() + 2000
    run = new_run(world.blobs, words(30), deadline_ms=deadline_ms)
    await world.runs.create(run)
    await world.steps.advance(run.id)
    await world.split_all()
    jobs = await in_flight_jobs(world, run.id)
    assert jobs and all(job.deadline_ms == deadline_ms for job in jobs)
    while await world.runs.now_ms() <= deadline_ms:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await world.steps.advance(run.id)
    view = await world.runs.get(run.id)
    assert view is not None and view.status is Status.EXPIRED
    assert view.documents[0].error is not None and view.documents[0].error.code == "deadline"
    assert await world.worker.work_once() == 0


async def test_a_run_for_a_model_that_no_worker_serves_waits(world: World) -> None:
    run = new_run(world.blobs, words(2), params=SummaryParams(model="later"))
    await world.runs.create(run)
    await world.steps.advance(run.id)
    with pytest.raises(UnknownModel, match="later"):
        await world.split_all()
    await world.steps.advance(run.id)
    assert world.splits == [(run.id, 0)]  # asked again, without waiting for what failed already
    view = await world.runs.get(run.id)
    assert view is not None and not view.header.is_finished


async def test_a_context_too_short_is_the_documents_error(world: World) -> None:
    params = SummaryParams(model=MODEL, target_tokens=400)
    run = new_run(world.blobs, words(2), params=params)
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    assert view.status is Status.FAILED and view.documents[0].error is not None
    assert view.documents[0].error.code == "context_length_exceeded"


async def test_a_summary_that_grew_too_long_to_be_joined_fails_by_name(world: World) -> None:
    def long_winded(claim: Claim) -> Outcome:
        choice = Choice(index=0, text="x" * 400, token_ids=[], finish_reason="length")
        return Outcome(status=Status.SUCCEEDED, result=Result(choices=[choice]), usage=USAGE)

    world.worker.answer = long_winded
    run = new_run(world.blobs, words(30))
    await world.runs.create(run)
    view = await world.bring_to_end(run.id)
    assert view.status is Status.FAILED
    error = view.documents[0].error
    assert error is not None and error.code == "context_length_exceeded"
    assert any(one.item.startswith("reduce-1-") for one in view.documents[0].failures)


async def test_files_are_summarized_as_they_were_when_read(world: World, tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    note, page = tmp_path / "inputs" / "note.md", tmp_path / "inputs" / "page.html"
    note.write_text(words(30, "before"))
    page.write_text("<p>hello</p>")
    run = new_run(world.blobs)
    run.documents = [
        DocumentSource(id="note", name="note.md", uri=note.as_uri()),
        DocumentSource(id="page", name="page.html", uri=page.as_uri()),
        DocumentSource(id="passwd", name="passwd", uri="file:///etc/passwd"),
    ]
    await world.runs.create(run)
    await world.steps.advance(run.id)
    await world.split_all()
    note.write_text(words(30, "after"))
    view = await world.bring_to_end(run.id)
    assert [one.status for one in view.documents] == [Status.SUCCEEDED, Status.FAILED, Status.FAILED]
    assert "after" not in "".join(world.worker.prompts.values())
    errors = report_of(view).document_errors
    assert errors["page"].code == "unsupported_type" and ".html" in errors["page"].message
    assert errors["passwd"].code == "invalid_request"


async def test_a_run_of_many_documents_reads_no_more_than_it_needs(world: World) -> None:
    run = new_run(world.blobs, *(words(30) for _ in range(40)))
    await world.runs.create(run)
    await world.steps.advance(run.id)
    assert len(world.splits) == WINDOW
    await world.split_all()
    documents = await world.runs.documents(run.id, range(40))
    num_split = sum(document.state.chunks is not None for document in documents)
    assert num_split <= 2 * WINDOW
    assert (await world.bring_to_end(run.id, max_rounds=400)).status is Status.SUCCEEDED
    assert set(world.worker.items.values()) == {1}
