"""A document's state under every order of results, failures and repetitions."""

from __future__ import annotations

import copy

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from infra.contracts import JobError, Usage
from infra.runs import Chunk, DocumentState, ItemStatus
from infra.states import Status
from worker.runs import progress
from worker.runs.progress import ItemResult

ERROR = JobError(code="boom", message="it broke")


def new_state(num_chunks: int, fan_in: int = 3) -> DocumentState:
    chunks = [
        Chunk(start=max(0, 10 * n - 2), end=10 * n + 10, own_start=10 * n, num_tokens=5) for n in range(num_chunks)
    ]
    return progress.split(DocumentState(), chunks, num_bytes=10 * num_chunks, fan_in=fan_in)


def done(text: str) -> ItemResult:
    return ItemResult(text=text, usage=Usage(prompt_tokens=3, completion_tokens=2))


@given(data=st.data(), num_chunks=st.integers(1, 40), fan_in=st.integers(2, 9))
def test_any_order_of_any_results_ends_and_accounts_for_every_chunk(
    data: st.DataObject, num_chunks: int, fan_in: int
) -> None:
    state = new_state(num_chunks, fan_in)
    fed: list[str] = []
    texts: dict[str, str] = {}
    for _ in range(10 * num_chunks + 10):
        ready = progress.ready_items(state)
        assert not set(ready) & set(fed)  # nothing is fed twice
        if ready:
            some = ready[: data.draw(st.integers(1, len(ready)))]
            state = progress.feed(state, {item: f"job-{item}" for item in some})
            fed += some
        under_way = list(progress.fed_items(state))
        if not under_way:
            break
        ended = data.draw(st.lists(st.sampled_from(under_way), unique=True, min_size=1))
        results = {
            item: ItemResult(error=ERROR) if data.draw(st.integers(0, 3)) == 0 else done(f"<{item}>") for item in ended
        }
        before = copy.deepcopy(state)
        settled = progress.settle(state, "doc", results)
        assert state == before  # pure
        assert settled.items == [item for item in under_way if item in results]
        assert progress.settle(settled.state, "doc", results).state == settled.state  # late or twice: nothing
        state, texts = settled.state, texts | settled.texts

    tree = progress.tree_for(state)
    assert state.is_finished and progress.ready_items(state) == []
    assert all(state.items[item].status is not ItemStatus.FED for item in state.items)
    assert len(set(fed)) == len(fed)
    failed = {name for name, item in state.items.items() if item.status is ItemStatus.FAILED}
    assert {failure.item for failure in state.failures} == failed
    if state.status is Status.SUCCEEDED:
        assert state.summary == texts[tree.final]
        reached = chunks_in(state, tree.final)
        assert state.num_bytes_summarized == 10 * len(reached)
        assert (state.num_bytes_summarized == state.num_bytes) == (not failed)
    else:
        assert (state.status, state.summary, state.num_bytes_summarized) == (Status.FAILED, None, 0)
        assert state.error is not None and state.error.code == "boom"
    assert state.usage.prompt_tokens == 3 * sum(item.status is ItemStatus.DONE for item in state.items.values())


def chunks_in(state: DocumentState, item: str) -> list[str]:
    """Chunks whose summary found its way into this item's."""
    found = state.items.get(item)
    if found is None or found.status is not ItemStatus.DONE:
        return []
    joined = progress.tree_for(state).children[item]
    return [leaf for child in joined for leaf in chunks_in(state, child)] if joined else [item]


def test_before_the_end_finished_chunks_count() -> None:
    state = progress.feed(new_state(4), {"map-0": "a", "map-1": "b"})
    state = progress.settle(state, "doc", {"map-0": done("x"), "map-1": ItemResult(error=ERROR)}).state
    assert (state.num_bytes_summarized, state.status) == (10, Status.RUNNING)
    (failure,) = state.failures
    assert (failure.item, failure.start, failure.end, failure.error) == ("map-1", 10, 20, ERROR)


def test_a_failed_join_leaves_its_bytes_out_but_not_the_document() -> None:
    state = new_state(4, fan_in=2)
    maps = [f"map-{n}" for n in range(4)]
    state = progress.feed(state, dict.fromkeys(maps, "j"))
    state = progress.settle(state, "doc", {item: done(item) for item in maps}).state
    assert progress.ready_items(state) == ["reduce-1-0", "reduce-1-1"]
    state = progress.feed(state, {"reduce-1-0": "j", "reduce-1-1": "j"})
    state = progress.settle(state, "doc", {"reduce-1-0": ItemResult(error=ERROR), "reduce-1-1": done("right")}).state
    assert progress.done_children(state, "reduce-2-0") == ["reduce-1-1"]
    state = progress.feed(state, {"reduce-2-0": "j"})
    state = progress.settle(state, "doc", {"reduce-2-0": done("all")}).state
    assert (state.status, state.summary, state.num_bytes_summarized) == (Status.SUCCEEDED, "all", 20)
    assert [(one.item, one.start, one.end) for one in state.failures] == [("reduce-1-0", 0, 20)]


def test_when_no_chunk_can_be_summarized_no_join_is_fed() -> None:
    state = new_state(5, fan_in=2)
    maps = [f"map-{n}" for n in range(5)]
    state = progress.feed(state, dict.fromkeys(maps, "j"))
    state = progress.settle(state, "doc", dict.fromkeys(maps, ItemResult(error=ERROR))).state
    assert state.status is Status.FAILED and state.error is not None
    assert "none of its 5 chunks" in state.error.message and ERROR.message in state.error.message
    assert all(item.job_id is None for name, item in state.items.items() if name.startswith("reduce"))


def test_results_of_items_that_are_not_under_way_change_nothing() -> None:
    state = progress.feed(new_state(3), {"map-0": "j"})
    assert progress.settle(state, "doc", {"map-1": done("x"), "reduce-1-0": done("y")}).state == state


def test_a_refused_document_is_finished() -> None:
    state = progress.refused(DocumentState(), ERROR, num_bytes=None)
    assert state.is_finished and progress.ready_items(state) == [] and progress.fed_items(state) == {}


def test_states_survive_packing() -> None:
    state = progress.feed(new_state(3), {"map-0": "j"})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=DocumentState) == state
