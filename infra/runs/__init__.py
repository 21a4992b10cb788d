"""Runs: bulk workflows made of child jobs fed through a window.

`records` says what a run is, `store` what a run store promises; `redis` keeps it in Redis or Valkey, `memory` here.

The gateway needs `new_run_id`, `NewRun`, `SummaryParams`, `DocumentSource`, `document_blob` and of a `RunStore`
`create`, `get`, `cancel`; the steps of runs need the rest.
"""

from infra.runs.records import (
    Chunk,
    DocumentSource,
    DocumentState,
    Failure,
    ItemState,
    ItemStatus,
    NewRun,
    RunHeader,
    Style,
    SummaryParams,
    document_blob,
    map_item,
    new_run_id,
    output_blob,
    reduce_item,
)
from infra.runs.store import Document, DocumentUpdate, RunStore, Written
from infra.runs.views import DocumentView, Report, RunCounts, RunView, report_of

__all__ = [
    "Chunk",
    "Document",
    "DocumentSource",
    "DocumentState",
    "DocumentUpdate",
    "DocumentView",
    "Failure",
    "ItemState",
    "ItemStatus",
    "NewRun",
    "Report",
    "RunCounts",
    "RunHeader",
    "RunStore",
    "RunView",
    "Style",
    "SummaryParams",
    "Written",
    "document_blob",
    "map_item",
    "new_run_id",
    "output_blob",
    "reduce_item",
    "report_of",
]
