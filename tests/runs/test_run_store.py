"""What every run store promises, in memory and in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import redis

from infra.contracts import JobError
from infra.embedded import EmbeddedServer
from infra.errors import BadRequest, StoreUnavailable
from infra.runs import (
    Chunk,
    DocumentSource,
    DocumentState,
    DocumentUpdate,
    ItemState,
    ItemStatus,
    NewRun,
    RunStore,
    SummaryParams,
    Written,
    new_run_id,
    report_of,
)
from infra.runs.memory import MemoryRuns
from infra.runs.redis import RedisRuns
from infra.states import Status


@pytest.fixture
async def runs(store_url: str) -> AsyncIterator[RunStore]:
    opened: RunStore = MemoryRuns() if store_url == "memory" else RedisRuns.open(store_url)
    yield opened
    await opened.close()


def new_run(num_documents: int = 2, **changes: object) -> NewRun:
    documents = [DocumentSource(id=f"d{n}", name=f"d{n}.txt", blob=f"b{n}") for n in range(num_documents)]
    run = NewRun(id=new_run_id(), params=SummaryParams(model="m"), documents=documents)
    return msgspec.structs.replace(run, **changes)


async def state_of(runs: RunStore, run_id: str, number: int) -> DocumentState:
    (document,) = await runs.documents(run_id, [number])
    return document.state


async def feed(runs: RunStore, run_id: str, number: int, *items: str, window: int = 16) -> Written:
    state = await state_of(runs, run_id, number)
    state.items.update({item: ItemState(status=ItemStatus.FED, job_id=f"job-{item}") for item in items})
    return await runs.update(run_id, DocumentUpdate(number, state, fed=items), window=window)


async def test_create_writes_once_and_wakes(runs: RunStore) -> None:
    run = new_run()
    assert await runs.create(run)
    assert not await runs.create(new_run(5, id=run.id))
    view = await runs.get(run.id)
    assert view is not None
    assert (view.status, [one.id for one in view.documents]) == (Status.QUEUED, ["d0", "d1"])
    assert await runs.take_due(limit=10, hide_seconds=60) == [run.id]
    assert await runs.take_due(limit=10, hide_seconds=60) == []
    assert not await runs.create(run)  # a client that tries again wakes it again
    assert await runs.take_due(limit=10, hide_seconds=60) == [run.id]


async def test_what_is_unknown_is_none(runs: RunStore) -> None:
    assert await runs.get("run-00000000") is None
    assert await runs.cancel("run-00000000") is None
    assert await runs.header("run-00000000") is None
    assert await runs.documents("run-00000000", [0]) == []
    assert await runs.open_documents("run-00000000", limit=5) == []
    assert await runs.texts("run-00000000", 0, ["map-0"]) == {}
    assert await runs.in_flight("run-00000000") == []
    assert not await runs.finish("run-00000000", Status.FAILED)
    assert await runs.update("run-00000000", DocumentUpdate(0, DocumentState()), window=1) is Written.CLOSED


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"id": "x"}, "id"), ({"documents": []}, "documents"),
     ({"documents": [DocumentSource(id="a", name="a")]}, "documents[0]"),
     ({"documents": [DocumentSource(id="a", name="a", blob="b", uri="file:///c")]}, "documents[0]"),
     ({"documents": [DocumentSource(id="a", name="a", blob="b")] * 2}, "documents[1].id"),
     ({"params": SummaryParams(model="m", chunk_tokens=32, overlap_tokens=17)}, "overlap_tokens")],
)  # fmt: skip
async def test_bad_runs_are_refused_by_field(runs: RunStore, changes: dict[str, object], param: str) -> None:
    run = new_run(**changes)
    with pytest.raises(BadRequest) as caught:
        await runs.create(run)
    assert caught.value.param == param
    assert await runs.get(run.id) is None


async def test_an_update_is_written_once(runs: RunStore) -> None:
    run = new_run()
    await runs.create(run)
    state = await state_of(runs, run.id, 1)
    state.chunks = [Chunk(start=0, end=5, own_start=0, num_tokens=2)]
    assert await runs.update(run.id, DocumentUpdate(1, state), window=1) is Written.YES
    assert await runs.update(run.id, DocumentUpdate(1, state), window=1) is Written.STALE
    written = await state_of(runs, run.id, 1)
    assert (written.version, written.chunks) == (1, state.chunks)
    header = await runs.header(run.id)
    assert header is not None and header.status is Status.RUNNING and header.started_ms is not None
    view = await runs.get(run.id)
    assert view is not None and [one.num_chunks for one in view.documents] == [None, 1]


async def test_many_writers_one_wins_each_version(runs: RunStore) -> None:
    run = new_run(1)
    await runs.create(run)
    state = await state_of(runs, run.id, 0)
    answers = await asyncio.gather(*(runs.update(run.id, DocumentUpdate(0, state), window=1) for _ in range(20)))
    assert sorted(answers) == [Written.STALE] * 19 + [Written.YES]


async def test_the_window_holds_over_documents(runs: RunStore) -> None:
    run = new_run()
    await runs.create(run)
    assert await feed(runs, run.id, 0, "map-0", "map-1", window=3) is Written.YES
    assert await feed(runs, run.id, 1, "map-0", "map-1", window=3) is Written.FULL
    assert (await state_of(runs, run.id, 1)).items == {}
    assert await feed(runs, run.id, 1, "map-0", window=3) is Written.YES
    assert await runs.in_flight(run.id) == [(0, "map-0"), (0, "map-1"), (1, "map-0")]

    state = await state_of(runs, run.id, 0)
    state.items["map-0"] = ItemState(status=ItemStatus.DONE, job_id="job-map-0")
    update = DocumentUpdate(0, state, texts={"map-0": "summary ä"}, settled=["map-0"])
    assert await runs.update(run.id, update, window=3) is Written.YES
    assert await runs.in_flight(run.id) == [(0, "map-1"), (1, "map-0")]
    assert await runs.texts(run.id, 0, ["map-0", "map-1"]) == {"map-0": "summary ä"}
    assert await feed(runs, run.id, 1, "map-1", window=3) is Written.YES


async def test_room_given_back_can_be_taken_in_the_same_update(runs: RunStore) -> None:
    run = new_run(1)
    await runs.create(run)
    assert await feed(runs, run.id, 0, "map-0", window=1) is Written.YES
    state = await state_of(runs, run.id, 0)
    update = DocumentUpdate(0, state, fed=["map-1"], settled=["map-0"])
    assert await runs.update(run.id, update, window=1) is Written.YES
    assert await runs.in_flight(run.id) == [(0, "map-1")]


async def test_settling_what_is_not_fed_makes_no_room(runs: RunStore) -> None:
    run = new_run(1)
    await runs.create(run)
    assert await feed(runs, run.id, 0, "map-0", window=1) is Written.YES
    state = await state_of(runs, run.id, 0)
    update = DocumentUpdate(0, state, fed=["map-1"], settled=["map-7"])
    assert await runs.update(run.id, update, window=1) is Written.FULL


async def test_what_is_still_to_be_fed_is_counted_by_model(runs: RunStore) -> None:
    assert await runs.unfed() == {}
    run = new_run(3)
    await runs.create(run)
    await runs.create(new_run(2, params=SummaryParams(model="other")))
    assert await runs.unfed() == {"m": 3, "other": 2}  # a document that nobody has looked at is one item
    state = await state_of(runs, run.id, 0)
    state.status, state.fan_in, state.final_item = Status.RUNNING, 2, "reduce-2-0"
    state.chunks = [Chunk(start=10 * n, end=10 * n + 10, own_start=10 * n, num_tokens=5) for n in range(4)]
    assert await runs.update(run.id, DocumentUpdate(0, state), window=4) is Written.YES
    assert (await runs.unfed())["m"] == 2 + 4 + 2 + 1  # chunks, joins of two, the last join
    await feed(runs, run.id, 0, "map-0", "map-1")
    assert (await runs.unfed())["m"] == 2 + 5
    assert await feed(runs, run.id, 0, "map-2", window=2) is Written.FULL  # and nothing changed
    assert (await runs.unfed())["m"] == 2 + 5
    state = await state_of(runs, run.id, 0)
    state.status = Status.FAILED
    await runs.update(run.id, DocumentUpdate(0, state), window=4)
    assert (await runs.unfed())["m"] == 2
    for number in (1, 2):
        state = await state_of(runs, run.id, number)
        state.status, state.fan_in, state.final_item = Status.RUNNING, 2, "map-0"
        state.chunks = [Chunk(start=0, end=10, own_start=0, num_tokens=5)]
        await runs.update(run.id, DocumentUpdate(number, state), window=4)
        await feed(runs, run.id, number, "map-0")
    assert (await runs.unfed())["m"] == 1  # nothing is unfed, but what was fed may not have reached the queue
    await runs.cancel(run.id)
    assert await runs.unfed() == {"other": 2}


async def test_finished_documents_leave_the_open_ones(runs: RunStore) -> None:
    run = new_run(12)
    await runs.create(run)
    for number in (0, 3):
        state = await state_of(runs, run.id, number)
        state.status = Status.SUCCEEDED
        assert await runs.update(run.id, DocumentUpdate(number, state), window=1) is Written.YES
    assert await runs.open_documents(run.id, limit=4) == [1, 2, 4, 5]
    assert await runs.open_documents(run.id, limit=100, after=5) == [6, 7, 8, 9, 10, 11]


async def test_a_run_ends_once_and_nothing_is_written_after(runs: RunStore) -> None:
    run = new_run(1)
    await runs.create(run)
    assert not await runs.rest(run.id)
    error = JobError(code="c", message="m")
    assert await runs.finish(run.id, Status.FAILED, error=error, output="runs/x/output.jsonl")
    assert not await runs.finish(run.id, Status.SUCCEEDED)
    assert await feed(runs, run.id, 0, "map-0") is Written.CLOSED
    view = await runs.get(run.id)
    assert view is not None
    assert (view.status, view.header.error, view.header.output) == (Status.FAILED, error, "runs/x/output.jsonl")
    assert view.header.finished_ms is not None
    assert [(one.status, one.error) for one in view.documents] == [(Status.FAILED, error)]
    assert not await runs.create(run)
    assert await runs.rest(run.id)
    assert await runs.take_due(limit=10, hide_seconds=0) == []


async def test_cancel_ends_at_once_and_wakes(runs: RunStore) -> None:
    run = new_run()
    await runs.create(run)
    await feed(runs, run.id, 0, "map-0")
    assert await runs.take_due(limit=1, hide_seconds=60) == [run.id]
    view = await runs.cancel(run.id)
    assert view is not None and view.status is Status.CANCELLED
    assert {one.status for one in view.documents} == {Status.CANCELLED}
    assert await runs.take_due(limit=1, hide_seconds=60) == [run.id]
    assert await runs.in_flight(run.id) == [(0, "map-0")]
    await runs.drop_in_flight(run.id, [(0, "map-0")])
    assert await runs.in_flight(run.id) == []
    again = await runs.cancel(run.id)
    assert again is not None and again.header.finished_ms == view.header.finished_ms


async def test_the_clock(runs: RunStore) -> None:
    first, second = new_run(), new_run()
    for run in (first, second):
        await runs.create(run)
    assert sorted(await runs.take_due(limit=10, hide_seconds=0.05)) == sorted([first.id, second.id])
    await runs.wake(first.id)
    assert await runs.take_due(limit=10, hide_seconds=60) == [first.id]
    await asyncio.sleep(0.06)
    assert await runs.take_due(limit=10, hide_seconds=60) == [second.id]  # returned by itself
    await runs.wake(first.id)
    await runs.wake(first.id, delay_seconds=60)  # later than wanted before: the earlier stands
    assert await runs.take_due(limit=10, hide_seconds=60) == [first.id]
    await runs.delay(second.id, delay_seconds=0)
    assert await runs.take_due(limit=10, hide_seconds=60) == [second.id]
    await runs.delay("run-99999999", delay_seconds=0)
    assert await runs.take_due(limit=10, hide_seconds=60) == []


async def test_a_view_counts_everything(runs: RunStore) -> None:
    run = new_run(2)
    await runs.create(run)
    state = await state_of(runs, run.id, 0)
    state.chunks = [
        Chunk(start=0, end=60, own_start=0, num_tokens=9),
        Chunk(start=50, end=100, own_start=60, num_tokens=9),
    ]
    state.num_bytes, state.num_bytes_summarized = 100, 60
    state.items = {
        "map-0": ItemState(status=ItemStatus.DONE, job_id="job-a"),
        "map-1": ItemState(status=ItemStatus.FAILED, error=JobError(code="x", message="y")),
        "reduce-1-0": ItemState(status=ItemStatus.FED, job_id="job-b"),
    }
    state.final_item = "reduce-1-0"
    await runs.update(run.id, DocumentUpdate(0, state), window=1)
    view = await runs.get(run.id)
    assert view is not None
    document = view.documents[0]
    assert (document.num_chunks, document.num_chunks_done, document.num_chunks_failed) == (2, 1, 1)
    assert document.streaming_job_id == "job-b"
    report = report_of(view)
    assert (report.counts.documents, report.counts.chunks, report.counts.chunks_failed) == (2, 2, 1)
    assert report.coverage == 0.6


async def test_a_server_that_is_gone_is_unavailable() -> None:
    runs = RedisRuns.open("redis://127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable):
        await runs.create(new_run())
    with pytest.raises(StoreUnavailable):
        await runs.take_due(limit=1, hide_seconds=1)
    await runs.close()


async def test_runs_go_on_when_memory_is_full(tmp_path: Path) -> None:
    """What is accepted is read, advanced and finished; only a new run is refused."""
    with EmbeddedServer(tmp_path) as url, redis.Redis.from_url(url) as server:
        runs = RedisRuns.open(url)
        run = new_run(1)
        assert await runs.create(run)
        server.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable):
            await runs.create(new_run(1))
        assert await feed(runs, run.id, 0, "m0") is Written.YES
        assert await runs.unfed() == {"m": 1}
        assert await runs.cancel(run.id) is not None
        view = await runs.get(run.id)
        assert view is not None and view.status is Status.CANCELLED
        await runs.close()
