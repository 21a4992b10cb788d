"""Documents on their way: sent as runs no larger than the gateway takes, and looked at as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from api_gateway.schemas.runs import DocumentOut, FailureView, RunOut
from millstream.client.client import Client
from millstream.client.errors import ApiError
from millstream.client.job import JobHandle
from millstream.client.run import RunHandle
from millstream.summarize.documents import Document
from millstream.summarize.progress import DocumentProgress

MAX_RUN_BYTES = 4 * 2**20  # half of what a gateway takes unless it is told otherwise: JSON needs room, too
MAX_RUN_DOCUMENTS = 5_000
_MAX_NAME = 512
_TOO_LARGE = 413


@dataclass
class Totals:
    """Sums over all documents."""

    num_chunks: int = 0
    num_bytes: int = 0
    num_bytes_summarized: int = 0
    num_tokens: int = 0  # of prompts and of what was generated

    @property
    def coverage(self) -> float | None:
        """Bytes summarized / bytes given; None where no bytes were given."""
        return self.num_bytes_summarized / self.num_bytes if self.num_bytes else None


class StartRun(Protocol):
    """Starts one run for some of the documents."""

    def __call__(self, documents: list[dict[str, Any]]) -> RunHandle: ...


@dataclass
class Session:
    """The documents of one call of `summarize`, and the runs that summarize them."""

    client: Client
    documents: Sequence[Document]
    _runs: list[tuple[RunHandle, list[int]]] = field(default_factory=list)  # each with its documents' numbers
    _ended: dict[str, RunOut] = field(default_factory=dict)
    _problems: dict[int, str] = field(default_factory=dict)  # document number -> why it was not sent

    def start(self, start_run: StartRun) -> None:
        """Sends the documents. Raises ApiError where the gateway refuses them all alike."""
        self._problems = {number: one.problem for number, one in enumerate(self.documents) if one.problem is not None}
        for numbers in _batches(self.documents):
            self._send(numbers, start_run)

    def look(self) -> list[DocumentProgress]:
        """Every document as it stands, in the order given."""
        found = {
            number: DocumentProgress(id=str(number), name=self.documents[number].name, status="failed", error=problem)
            for number, problem in self._problems.items()
        }
        for run, numbers in self._runs:
            for number, out in zip(numbers, self._get(run).documents, strict=True):
                found[number] = _progress(str(number), self.documents[number].name, out)
        return [found[number] for number in range(len(self.documents))]

    def job(self, job_id: str) -> JobHandle:
        return self.client.job(job_id)

    def cancel(self) -> None:
        for run, _ in self._runs:
            run.cancel()

    def totals(self) -> Totals:
        totals = Totals()
        for run, _ in self._runs:
            out = self._get(run)
            totals.num_chunks += out.counts.chunks
            totals.num_bytes += out.counts.bytes
            totals.num_bytes_summarized += out.counts.bytes_summarized
            totals.num_tokens += out.usage.total_tokens
        return totals

    def _get(self, run: RunHandle) -> RunOut:
        """A run that has ended does not change, and is not asked for again."""
        out = self._ended.get(run.id) or run.get()
        if out.finished_at is not None:
            self._ended[run.id] = out
        return out

    def _send(self, numbers: list[int], start_run: StartRun) -> None:
        """Sends these documents as one run, or as two where the gateway finds them too large."""
        try:
            run = start_run([_wire(number, self.documents[number]) for number in numbers])
        except ApiError as error:
            if error.status != _TOO_LARGE:
                raise
            if len(numbers) == 1:
                self._problems[numbers[0]] = f"{error.message} (or name it by a file:// or s3:// address)"
                return
            middle = len(numbers) // 2
            self._send(numbers[:middle], start_run)
            self._send(numbers[middle:], start_run)
        else:
            self._runs.append((run, numbers))


def _batches(documents: Sequence[Document]) -> Iterator[list[int]]:
    """Numbers of the documents that can be sent, in order, each batch within the bounds where one document is."""
    batch: list[int] = []
    num_bytes = 0
    for number, document in enumerate(documents):
        if document.problem is not None:
            continue
        size = len((document.text or "").encode("utf-8", "replace"))
        if batch and (num_bytes + size > MAX_RUN_BYTES or len(batch) >= MAX_RUN_DOCUMENTS):
            yield batch
            batch, num_bytes = [], 0
        batch.append(number)
        num_bytes += size
    if batch:
        yield batch


def _wire(number: int, document: Document) -> dict[str, Any]:
    content = {"uri": document.uri} if document.text is None else {"text": document.text}
    return {"id": str(number), "name": document.name[-_MAX_NAME:], **content}


def _progress(document_id: str, name: str, out: DocumentOut) -> DocumentProgress:
    return DocumentProgress(
        id=document_id,
        name=name,
        status=out.status,
        num_chunks=out.num_chunks,
        num_chunks_done=out.num_chunks_done,
        num_chunks_failed=out.num_chunks_failed,
        summary=out.summary,
        error=out.error.message if out.error else None,
        failures=tuple(_failure(one) for one in out.failures),
        streaming_job_id=out.streaming_job_id,
        prompt_tokens=out.usage.prompt_tokens,
        completion_tokens=out.usage.completion_tokens,
    )


def _failure(failure: FailureView) -> str:
    return f"{failure.item} (bytes {failure.start} to {failure.end}) is missing: {failure.error.message}"
