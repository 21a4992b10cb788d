"""Runs as clients write and see them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api_gateway.schemas.errors import ErrorDetail
from api_gateway.schemas.jobs import UsageView
from infra.contracts import Tier, Webhook
from infra.runs import SummaryParams


class DocumentIn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One document: its text, or a file:// or s3:// address of it."""

    text: str | None = None
    uri: Annotated[str, Meta(min_length=1, max_length=2048)] | None = None
    id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # None: its number, from 0
    name: Annotated[str, Meta(max_length=512)] | None = None  # what people call it; None: its id


class SummarizeRequest(SummaryParams, kw_only=True, forbid_unknown_fields=True):
    """Documents to summarize, and how: every document in chunks, the chunks' summaries joined to one."""

    documents: list[DocumentIn]
    tier: Tier = Tier.BULK
    priority: int = 0
    deadline: float | str | None = None  # Unix seconds, or RFC 3339
    webhook: Webhook | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)


class FailureView(msgspec.Struct, kw_only=True):
    """A part of a document that could not be summarized: bytes [start, end) of its text."""

    document_id: str
    item: str
    start: int
    end: int
    error: ErrorDetail


class DocumentOut(msgspec.Struct, kw_only=True):
    id: str
    name: str
    status: str
    num_chunks: int | None  # null until the document has been read and split
    num_chunks_done: int
    num_chunks_failed: int
    num_bytes: int | None
    num_bytes_summarized: int
    summary: str | None
    error: ErrorDetail | None
    streaming_job_id: str | None  # the job that writes `summary`: its events can be streamed; 404 until it is queued
    usage: UsageView
    failures: list[FailureView]


class CountsView(msgspec.Struct, kw_only=True):
    documents: int
    documents_succeeded: int
    documents_failed: int
    chunks: int
    chunks_done: int
    chunks_failed: int
    bytes: int
    bytes_summarized: int


class RunOut(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["run"] = "run"
    kind: Literal["summarize"] = "summarize"
    model: str
    status: str
    tier: Tier
    priority: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    deadline: float | None
    params: dict[str, Any]
    counts: CountsView
    coverage: float | None  # bytes summarized / bytes given
    usage: UsageView
    error: ErrorDetail | None
    documents: list[DocumentOut]  # in the order given
    metadata: dict[str, str]
    has_output: bool  # whether `GET /v1/runs/{id}/output` has the summaries as JSONL


class ReportView(msgspec.Struct, kw_only=True):
    """What a run did, every byte and every failure accounted for."""

    run_id: str
    status: str
    counts: CountsView
    coverage: float | None
    usage: UsageView
    failures: list[FailureView]
    document_errors: dict[str, ErrorDetail]  # document id -> why it has no summary
