"""What becomes of a document as its items come in: state -> state. Pure, so doing it twice or late changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from infra.contracts import JobError, Usage
from infra.runs import Chunk, DocumentState, Failure, ItemState, ItemStatus
from infra.states import Status
from worker.runs.tree import Tree, tree_of


@dataclass(frozen=True, slots=True)
class ItemResult:
    """How a job of an item ended: with a text, or with an error."""

    text: str | None = None
    error: JobError | None = None
    usage: Usage = field(default_factory=Usage)
    cut: bool = False  # ended by length


@dataclass(frozen=True, slots=True)
class Settled:
    """A document after results came in."""

    state: DocumentState
    texts: dict[str, str]
    items: list[str]  # that were fed and are settled now


def tree_for(state: DocumentState) -> Tree:
    """The tree of a document that has been split."""
    if state.chunks is None or state.fan_in is None:
        raise ValueError("the document has not been split")
    return tree_of(len(state.chunks), state.fan_in)


def split(state: DocumentState, chunks: Sequence[Chunk], *, num_bytes: int, fan_in: int) -> DocumentState:
    """The document with its chunks; there is at least one."""
    return msgspec.structs.replace(
        state,
        status=Status.RUNNING,
        chunks=list(chunks),
        num_bytes=num_bytes,
        fan_in=fan_in,
        final_item=tree_of(len(chunks), fan_in).final,
    )


def refused(state: DocumentState, error: JobError, *, num_bytes: int | None) -> DocumentState:
    """The document ended before it was split: it cannot be read, or holds nothing."""
    return msgspec.structs.replace(state, status=Status.FAILED, error=error, num_bytes=num_bytes)


def ready_items(state: DocumentState) -> list[str]:
    """Items that can be fed now: not fed yet, and all that they join is settled. Chunks first, in order."""
    if state.is_finished or state.chunks is None:
        return []
    return [
        item
        for item, joined in tree_for(state).children.items()
        if item not in state.items and all(_is_settled(state, child) for child in joined)
    ]


def fed_items(state: DocumentState) -> dict[str, str]:
    """Items whose jobs are under way -> job id."""
    return {
        name: item.job_id
        for name, item in state.items.items()
        if item.status is ItemStatus.FED and item.job_id is not None
    }


def feed(state: DocumentState, job_ids: Mapping[str, str]) -> DocumentState:
    """The document with these items fed, each to its job."""
    fed = {name: ItemState(status=ItemStatus.FED, job_id=job_id) for name, job_id in job_ids.items()}
    return msgspec.structs.replace(state, items={**state.items, **fed})


def done_children(state: DocumentState, item: str) -> list[str]:
    """What a reduce has to join: those of its children that have a summary."""
    return [child for child in tree_for(state).children[item] if _is_done(state, child)]


def settle(state: DocumentState, document_id: str, results: Mapping[str, ItemResult]) -> Settled:
    """The document with results of fed items taken in; results of others are passed over.

    A reduce all of whose children failed has nothing to join: it fails without a job. When the final item is settled,
    the document is finished.
    """
    if state.is_finished:
        return Settled(state, {}, [])
    tree = tree_for(state)
    items, usage = dict(state.items), state.usage
    failures, texts, settled = list(state.failures), {}, []

    def fail(name: str, error: JobError, job_id: str | None) -> None:
        items[name] = ItemState(status=ItemStatus.FAILED, job_id=job_id, error=error)
        span = tree.spans[name]
        start, end = _bytes_of(state, span)
        failures.append(Failure(document_id=document_id, item=name, start=start, end=end, error=error))

    for name, job_id in fed_items(state).items():
        if (result := results.get(name)) is None:
            continue
        settled.append(name)
        usage = _sum(usage, result.usage)
        if result.text is not None:
            items[name] = ItemState(status=ItemStatus.DONE, job_id=job_id, cut=result.cut)
            texts[name] = result.text
        else:
            fail(name, result.error or JobError(code="unknown", message="the job ended without a reason"), job_id)
    for name, joined in tree.children.items():  # children before parents, so failures climb as far as they must
        if joined and name not in items and all(_has_failed(items, child) for child in joined):
            fail(name, JobError(code="nothing_to_join", message="none of its parts could be summarized"), None)
    state = msgspec.structs.replace(state, items=items, usage=usage, failures=failures)
    state.num_bytes_summarized = num_bytes_summarized(state)
    if _is_settled(state, tree.final):
        state = _finished(state, tree, texts.get(tree.final))
    return Settled(state, texts, settled)


def num_bytes_summarized(state: DocumentState) -> int:
    """Bytes of chunks whose summary is done and, once the final item is settled, has found its way into it."""
    tree, chunks = tree_for(state), state.chunks or []
    counted = set(tree.children)
    if _is_settled(state, tree.final):
        counted, open_items = set(), [tree.final]
        while open_items:
            item = open_items.pop()
            if _is_done(state, item):
                counted.add(item)
                open_items += tree.children[item]
    done = [item for item, joined in tree.children.items() if not joined and item in counted and _is_done(state, item)]
    return sum(chunks[tree.spans[item].start].end - chunks[tree.spans[item].start].own_start for item in done)


def _finished(state: DocumentState, tree: Tree, summary: str | None) -> DocumentState:
    if summary is not None:
        return msgspec.structs.replace(state, status=Status.SUCCEEDED, summary=summary)
    first = min(state.failures, key=lambda failure: failure.start)
    error = state.items[tree.final].error
    if error is None or error.code == "nothing_to_join":
        message = f"none of its {len(state.chunks or [])} chunks could be summarized; the first: {first.error.message}"
        error = JobError(code=first.error.code, message=message)
    return msgspec.structs.replace(state, status=Status.FAILED, error=error)


def _bytes_of(state: DocumentState, span: range) -> tuple[int, int]:
    chunks = state.chunks or []
    return chunks[span.start].own_start, chunks[span.stop - 1].end


def _is_done(state: DocumentState, item: str) -> bool:
    found = state.items.get(item)
    return found is not None and found.status is ItemStatus.DONE


def _is_settled(state: DocumentState, item: str) -> bool:
    found = state.items.get(item)
    return found is not None and found.status is not ItemStatus.FED


def _has_failed(items: Mapping[str, ItemState], item: str) -> bool:
    found = items.get(item)
    return found is not None and found.status is ItemStatus.FAILED


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
    )
