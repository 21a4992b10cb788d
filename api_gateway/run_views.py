"""Runs as clients see them: made from the run store's views. Pure."""

from __future__ import annotations

import msgspec

from api_gateway.schemas.runs import CountsView, DocumentOut, FailureView, ReportView, RunOut
from api_gateway.views import error_view, seconds, usage_view
from infra.runs import DocumentView, Failure, RunCounts, RunView, report_of


def run_out(view: RunView) -> RunOut:
    header, counts = view.header, view.counts
    run = header.run
    return RunOut(
        id=view.id,
        model=run.params.model,
        status=view.status,
        tier=run.tier,
        priority=run.priority,
        created_at=header.created_ms / 1000,
        started_at=seconds(header.started_ms),
        finished_at=seconds(header.finished_ms),
        deadline=seconds(run.deadline_ms),
        params=msgspec.structs.asdict(run.params),
        counts=_counts(counts),
        coverage=counts.coverage,
        usage=usage_view(counts.usage),
        error=error_view(header.error) if header.error else None,
        documents=[_document(document) for document in view.documents],
        metadata=run.metadata,
        has_output=header.output is not None,
    )


def report_view(view: RunView) -> ReportView:
    report = report_of(view)
    return ReportView(
        run_id=report.run_id,
        status=report.status,
        counts=_counts(report.counts),
        coverage=report.coverage,
        usage=usage_view(report.counts.usage),
        failures=[_failure(failure) for failure in report.failures],
        document_errors={key: error_view(error) for key, error in report.document_errors.items()},
    )


def _counts(counts: RunCounts) -> CountsView:
    return CountsView(**{name: getattr(counts, name) for name in CountsView.__struct_fields__})


def _document(document: DocumentView) -> DocumentOut:
    return DocumentOut(
        id=document.id,
        name=document.name,
        status=document.status,
        num_chunks=document.num_chunks,
        num_chunks_done=document.num_chunks_done,
        num_chunks_failed=document.num_chunks_failed,
        num_bytes=document.num_bytes,
        num_bytes_summarized=document.num_bytes_summarized,
        summary=document.summary,
        error=error_view(document.error) if document.error else None,
        streaming_job_id=document.streaming_job_id,
        usage=usage_view(document.usage),
        failures=[_failure(failure) for failure in document.failures],
    )


def _failure(failure: Failure) -> FailureView:
    return FailureView(
        document_id=failure.document_id,
        item=failure.item,
        start=failure.start,
        end=failure.end,
        error=error_view(failure.error),
    )
