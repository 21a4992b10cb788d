"""What a run is: what was asked for, what became of each document, and what a client sees of it."""

from __future__ import annotations

import re
import secrets
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from infra.contracts import VERSION, JobError, Struct, Tier, Usage, Webhook
from infra.errors import BadRequest
from infra.states import TERMINAL, Status

MAX_DOCUMENTS = 10_000

_RUN_ID = re.compile(r"run-[0-9a-z]{8,64}")


def new_run_id() -> str:
    return f"run-{secrets.token_hex(12)}"


def is_run_id(text: str) -> bool:
    return _RUN_ID.fullmatch(text) is not None


def document_blob(run_id: str, number: int) -> str:
    """Key of the blob that holds the inline text (UTF-8) of a run's document."""
    return f"runs/{run_id}/documents/{number}.txt"


def output_blob(run_id: str) -> str:
    """Key of the blob that holds a finished run's output: JSONL, one line a document."""
    return f"runs/{run_id}/output.jsonl"


class Style(StrEnum):
    ABSTRACT = "abstract"
    BULLETS = "bullets"
    HEADLINE = "headline"


class SummaryParams(Struct):
    """How to summarize. A request body may be converted to this directly: wrong types and ranges are refused."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    style: Style = Style.ABSTRACT
    # Own instruction for the model in place of the style's, e.g. "List the risks named in the text."
    template: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    target_tokens: Annotated[int, Meta(ge=1, le=8192)] = 128  # a summary's length at most, in the model's tokens
    # A chunk's length at most, in the model's tokens; None: 1024, less where the context is short.
    chunk_tokens: Annotated[int, Meta(ge=16, le=1_000_000)] | None = None
    overlap_tokens: Annotated[int, Meta(ge=0, le=100_000)] = 0  # of a chunk's start with the end of the one before
    fan_in: Annotated[int, Meta(ge=2, le=64)] = 8  # summaries that one reduce joins
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None  # of the summaries; None: the text's own

    def check(self) -> None:
        """Raises BadRequest where fields contradict each other."""
        if self.chunk_tokens is not None and self.overlap_tokens * 2 > self.chunk_tokens:
            raise BadRequest(
                f"overlap_tokens is {self.overlap_tokens}, more than half of chunk_tokens ({self.chunk_tokens}); "
                "make the chunks longer or the overlap shorter",
                param="overlap_tokens",
            )


class DocumentSource(Struct):
    """One document to summarize: `blob` (a key, see `document_blob`) or `uri` (file://, s3://), and not both."""

    id: str  # the caller's, repeated in the output; unique within the run
    name: str  # what people call it: a file's name, a title
    blob: str | None = None
    uri: str | None = None


class NewRun(Struct):
    """A run about to be admitted. Writing it twice with one id writes it once."""

    id: str
    params: SummaryParams
    documents: list[DocumentSource]
    tier: Tier = Tier.BULK  # of the child jobs
    priority: int = 0
    tenant: str = "default"
    deadline_ms: int | None = None  # expires if not finished by this point of Redis time
    salt: str = ""  # prefix-cache domain of the child jobs, as in JobSpec
    webhook: Webhook | None = None  # told of "run.completed" and "run.failed"
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    traceparent: str | None = None
    v: int = VERSION

    def check(self) -> None:
        """Raises BadRequest naming the field that cannot be used."""
        self.params.check()
        if not is_run_id(self.id):
            raise BadRequest(f"{self.id[:80]!r} is not a run id", param="id")
        if not 1 <= len(self.documents) <= MAX_DOCUMENTS:
            raise BadRequest(
                f"a run takes 1 to {MAX_DOCUMENTS} documents, not {len(self.documents)}", param="documents"
            )
        seen: set[str] = set()
        for number, source in enumerate(self.documents):
            if (source.blob is None) == (source.uri is None):
                raise BadRequest("give a document either a text or a uri", param=f"documents[{number}]")
            if source.id in seen:
                raise BadRequest(f"two documents have the id {source.id[:80]!r}", param=f"documents[{number}].id")
            seen.add(source.id)


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """Bytes [start, end) of a document's UTF-8 text: one map item.

    `start` reaches back by the overlap; `own_start` does not: bytes [own_start, end) of all chunks are the document.
    """

    start: int
    end: int
    own_start: int
    num_tokens: int


def map_item(index: int) -> str:
    """Id of the item that summarizes chunk `index` of a document."""
    return f"map-{index}"


def reduce_item(level: int, index: int) -> str:
    """Id of the item that joins summaries of the level below; level 1 joins chunks."""
    return f"reduce-{level}-{index}"


class ItemStatus(StrEnum):
    FED = "fed"  # its job is, or is about to be, in the queue
    DONE = "done"
    FAILED = "failed"


class ItemState(Struct):
    """What became of one item (a chunk's map or a reduce). An item without a state waits to be fed."""

    status: ItemStatus
    job_id: str | None = None  # None where it failed before it was fed
    error: JobError | None = None
    cut: bool = False  # its text ended by length, not by the model


class Failure(Struct):
    """One item that could not be summarized, and which bytes of the document it stood for."""

    document_id: str
    item: str
    start: int
    end: int
    error: JobError


class DocumentState(Struct):
    """What became of one document. Changes only by compare-and-set on `version`."""

    version: int = 0
    status: Status = Status.QUEUED
    chunks: list[Chunk] | None = None  # None until split
    items: dict[str, ItemState] = msgspec.field(default_factory=dict)
    num_bytes: int | None = None  # of the text; None until read
    num_bytes_summarized: int = 0  # of those, what chunks that were summarized stand for
    split_asked_ms: int | None = None  # when a split step was last sent
    fan_in: int | None = None  # what the run asked for, or less where the context is short; None until split
    final_item: str | None = None  # the item that writes `summary`; None until split
    failures: list[Failure] = msgspec.field(default_factory=list)
    summary: str | None = None
    error: JobError | None = None
    usage: Usage = msgspec.field(default_factory=Usage)

    @property
    def is_finished(self) -> bool:
        return self.status in TERMINAL

    @property
    def num_unfed(self) -> int:
        """Items that are still to be put on the queue; 1 while the document is not split."""
        if self.is_finished:
            return 0
        if self.chunks is None or self.fan_in is None:
            return 1
        level = num_items = len(self.chunks)
        while level > 1:
            level = -(-level // self.fan_in)
            num_items += level
        return 0 if self.final_item in self.items else max(1, num_items - len(self.items))


class RunHeader(Struct):
    """A run without its documents."""

    run: NewRun  # its `documents` left empty: `num_documents` counts them
    status: Status
    num_documents: int
    created_ms: int
    started_ms: int | None = None
    finished_ms: int | None = None
    error: JobError | None = None
    output: str | None = None  # key of the output's blob, once written
    sequence_number: int = 0  # grows with every change that is told to the outside

    @property
    def is_finished(self) -> bool:
        return self.status in TERMINAL
