"""Output without a terminal: progress as lines, summaries as text in the order of the documents, or JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

import msgspec

from millstream.summarize.progress import DocumentProgress, Listener


class PlainProgress(Listener):
    """One line on `stream` for each step of a document."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._counts: dict[str, tuple[int, int]] = {}  # document id -> (done, of all)

    def opened(self, documents: Sequence[DocumentProgress]) -> None:
        self._line("1 document" if len(documents) == 1 else f"{len(documents)} documents")

    def changed(self, document: DocumentProgress) -> None:
        if document.num_chunks is None:
            return
        counts = (document.num_chunks_done + document.num_chunks_failed, document.num_chunks)
        if counts != self._counts.get(document.id):
            self._counts[document.id] = counts
            self._line(f"{document.name}: {counts[0]}/{counts[1]} chunks")

    def finished(self, document: DocumentProgress) -> None:
        told = document.error or document.status
        self._line(told if told.startswith(document.name) else f"{document.name}: {told}")
        for failure in document.failures:
            self._line(f"{document.name}: {failure}")

    def noted(self, text: str) -> None:
        self._line(text)

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class SummaryText(Listener):
    """Summaries on `stream` in the order of the documents: the first unfinished one as it is written, then the next."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: list[str] = []  # ids of documents not fully shown, in order
        self._names: dict[str, str] = {}
        self._written: dict[str, str] = {}  # pieces so far
        self._finished: dict[str, DocumentProgress] = {}
        self._shown = ""  # of the head's pieces
        self._is_headed = False

    def opened(self, documents: Sequence[DocumentProgress]) -> None:
        self._waiting = [document.id for document in documents]
        self._names = {document.id: document.name for document in documents}

    def piece(self, document_id: str, text: str) -> None:
        self._written[document_id] = (self._written.get(document_id, "") + text).lstrip()
        self._advance()

    def restarted(self, document_id: str) -> None:
        self._written[document_id] = ""

    def finished(self, document: DocumentProgress) -> None:
        self._finished[document.id] = document
        self._advance()

    def closed(self) -> None:
        if self._is_headed:  # cut short in the middle of a summary
            self._write("\n")

    def _advance(self) -> None:
        while self._waiting:
            head = self._waiting[0]
            document = self._finished.get(head)
            if document is None:
                self._show(self._written.get(head, ""))
                return
            self._show(document.summary.strip() if document.summary else f"error: {document.error or document.status}")
            self._write("\n\n")
            self._waiting.pop(0)
            self._shown, self._is_headed = "", False

    def _show(self, text: str) -> None:
        """Writes what of `text` is not written yet. A text that does not continue it starts anew."""
        if not text:
            return
        if not self._is_headed:
            self._write(f"== {self._names[self._waiting[0]]}\n")
            self._is_headed = True
        if text.startswith(self._shown):
            self._write(text[len(self._shown) :])
        elif self._shown.rstrip() != text:
            self._write(f"\n[written anew]\n{text}")
        self._shown = text

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class JsonLines(Listener):
    """One JSON object a finished document on `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def finished(self, document: DocumentProgress) -> None:
        print(json_line(document), file=self._stream, flush=True)


def json_line(document: DocumentProgress) -> str:
    return msgspec.json.encode(
        {
            "id": document.id,
            "name": document.name,
            "status": document.status,
            "summary": document.summary,
            "error": document.error,
            "chunks": {
                "total": document.num_chunks,
                "done": document.num_chunks_done,
                "failed": document.num_chunks_failed,
            },
            "failures": document.failures,
            "usage": {"prompt_tokens": document.prompt_tokens, "completion_tokens": document.completion_tokens},
        }
    ).decode()
