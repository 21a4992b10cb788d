"""A run as a client sees it: made from its records, never kept."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from infra.contracts import JobError, Struct, Usage
from infra.runs.records import DocumentSource, DocumentState, Failure, ItemStatus, RunHeader, map_item
from infra.states import TERMINAL, Status


class DocumentView(Struct):
    """A document as a client sees it."""

    id: str
    name: str
    status: Status
    num_chunks: int | None  # None until the document has been read and split
    num_chunks_done: int
    num_chunks_failed: int
    num_bytes: int | None
    num_bytes_summarized: int
    summary: str | None
    error: JobError | None
    streaming_job_id: str | None  # the job that writes `summary`, once it is known: its events can be streamed
    usage: Usage
    failures: list[Failure] = msgspec.field(default_factory=list)


class RunCounts(Struct):
    documents: int = 0
    documents_succeeded: int = 0
    documents_failed: int = 0  # cancelled and expired ones too
    chunks: int = 0
    chunks_done: int = 0
    chunks_failed: int = 0
    bytes: int = 0
    bytes_summarized: int = 0
    usage: Usage = msgspec.field(default_factory=Usage)

    @property
    def coverage(self) -> float | None:
        """Bytes summarized / bytes given; None where no bytes were given."""
        return self.bytes_summarized / self.bytes if self.bytes else None


class RunView(Struct):
    """A run as a client sees it."""

    id: str
    header: RunHeader
    documents: list[DocumentView]  # in the order given

    @property
    def status(self) -> Status:
        return self.header.status

    @property
    def counts(self) -> RunCounts:
        return count(self.documents)


class Report(Struct):
    """What a run did, every byte and every failure accounted for."""

    run_id: str
    status: Status
    counts: RunCounts
    coverage: float | None
    failures: list[Failure]
    document_errors: dict[str, JobError]  # document id -> why it has no summary


def count(documents: Sequence[DocumentView]) -> RunCounts:
    """The sum over documents."""
    return RunCounts(
        documents=len(documents),
        documents_succeeded=sum(one.status is Status.SUCCEEDED for one in documents),
        documents_failed=sum(one.status in TERMINAL and one.status is not Status.SUCCEEDED for one in documents),
        chunks=sum(one.num_chunks or 0 for one in documents),
        chunks_done=sum(one.num_chunks_done for one in documents),
        chunks_failed=sum(one.num_chunks_failed for one in documents),
        bytes=sum(one.num_bytes or 0 for one in documents),
        bytes_summarized=sum(one.num_bytes_summarized for one in documents),
        usage=Usage(
            prompt_tokens=sum(one.usage.prompt_tokens for one in documents),
            completion_tokens=sum(one.usage.completion_tokens for one in documents),
            cached_tokens=sum(one.usage.cached_tokens for one in documents),
        ),
    )


def report_of(view: RunView) -> Report:
    counts = view.counts
    return Report(
        run_id=view.id,
        status=view.status,
        counts=counts,
        coverage=counts.coverage,
        failures=[failure for document in view.documents for failure in document.failures],
        document_errors={one.id: one.error for one in view.documents if one.error is not None},
    )


def view_of(header: RunHeader, sources: Sequence[DocumentSource], states: Sequence[DocumentState]) -> RunView:
    """The run, its documents in the order given. `sources` and `states` run parallel."""
    documents = [_document(header, source, state) for source, state in zip(sources, states, strict=True)]
    return RunView(id=header.run.id, header=header, documents=documents)


def _document(header: RunHeader, source: DocumentSource, state: DocumentState) -> DocumentView:
    chunks = state.chunks or []
    maps = [state.items.get(map_item(index)) for index in range(len(chunks))]
    final = state.items.get(state.final_item) if state.final_item else None
    status, error = state.status, state.error
    if header.is_finished and not state.is_finished:  # the run ended over its head
        status, error = header.status, header.error
    return DocumentView(
        id=source.id,
        name=source.name,
        status=status,
        num_chunks=None if state.chunks is None else len(chunks),
        num_chunks_done=sum(item is not None and item.status is ItemStatus.DONE for item in maps),
        num_chunks_failed=sum(item is not None and item.status is ItemStatus.FAILED for item in maps),
        num_bytes=state.num_bytes,
        num_bytes_summarized=state.num_bytes_summarized,
        summary=state.summary,
        error=error,
        streaming_job_id=final.job_id if final else None,
        usage=state.usage,
        failures=state.failures,
    )
