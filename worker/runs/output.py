"""A finished run's output: JSONL, one line a document, every chunk accounted for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from infra.runs import Document, ItemStatus, RunHeader, RunStore
from worker.runs import progress

PAGE = 64


async def output_lines(runs: RunStore, header: RunHeader) -> AsyncIterator[bytes]:
    """The lines, in the order of the documents."""
    run_id = header.run.id
    for start in range(0, header.num_documents, PAGE):
        numbers = range(start, min(start + PAGE, header.num_documents))
        for document in await runs.documents(run_id, numbers):
            chunk_items = [item for item, joined in _children(document).items() if not joined]
            texts = await runs.texts(run_id, document.number, chunk_items)
            yield msgspec.json.encode(line_of(document, texts)) + b"\n"


def line_of(document: Document, texts: dict[str, str]) -> dict[str, Any]:
    """One document's line. `texts` holds the summaries of its chunks by item."""
    state = document.state
    return {
        "id": document.source.id,
        "name": document.source.name,
        "status": state.status,
        "summary": state.summary,
        "error": state.error,
        "bytes": state.num_bytes,
        "bytes_summarized": state.num_bytes_summarized,
        "usage": state.usage,
        "chunks": [_chunk(document, item, texts) for item, joined in _children(document).items() if not joined],
    }


def _chunk(document: Document, item: str, texts: dict[str, str]) -> dict[str, Any]:
    (number,) = progress.tree_for(document.state).spans[item]
    chunk = (document.state.chunks or [])[number]
    found = document.state.items.get(item)
    return {
        "start": chunk.start,
        "end": chunk.end,
        "tokens": chunk.num_tokens,
        "status": "waiting" if found is None else found.status,
        "summary": texts.get(item),
        "cut": found is not None and found.status is ItemStatus.DONE and found.cut,
        "error": None if found is None else found.error,
    }


def _children(document: Document) -> dict[str, tuple[str, ...]]:
    return {} if document.state.chunks is None else progress.tree_for(document.state).children
