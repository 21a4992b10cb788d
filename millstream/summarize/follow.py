"""Follows a run to its end: what changes is told to the listeners, summaries as they are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Thread

from millstream.client.errors import ApiError, ClientError
from millstream.client.job import JobHandle
from millstream.summarize.progress import DocumentProgress, Listener

MAX_STREAMS = 4  # summaries followed at once, the first documents first; others are shown when they are done
MAX_POLL_SECONDS = 5.0
_NOT_FOUND = 404

Look = Callable[[], Sequence[DocumentProgress]]
FindJob = Callable[[str], JobHandle]


@dataclass(frozen=True, slots=True)
class _Piece:
    document_id: str
    job_id: str
    text: str


@dataclass(frozen=True, slots=True)
class _Early:
    """A run names the job that writes a summary just before that job is queued: until then there is none to stream."""

    document_id: str
    job_id: str


@dataclass(frozen=True, slots=True)
class _Broken:
    document_id: str
    reason: str


class Follower:
    """Told of a run by `look`, which gives its documents as they stand; reads summaries from the jobs that write them.

    All listeners are called from the thread that calls `follow`; each stream is read in a thread of its own.
    """

    def __init__(self, look: Look, job: FindJob, listeners: Sequence[Listener], *, poll_seconds: float = 0.3) -> None:
        self._look = look
        self._job = job
        self._listeners = listeners
        self._poll_seconds = poll_seconds
        self._last: dict[str, DocumentProgress] = {}
        self._streams: dict[str, str] = {}  # document id -> the job whose pieces count
        self._news: Queue[_Piece | _Early | _Broken] = Queue()

    def follow(self) -> list[DocumentProgress]:
        """Returns the documents once all have ended. Raises ClientError where the gateway is lost."""
        documents = list(self._look())
        for listener in self._listeners:
            listener.opened(documents)
        while True:
            for document in documents:
                self._compare(document)
            if all(document.is_finished for document in documents):
                return documents
            self._open_streams(documents)
            self._relay_until(time.monotonic() + self._pause(len(documents)))
            documents = list(self._look())

    def _pause(self, num_documents: int) -> float:
        """A look at many documents costs more, so there are fewer of them."""
        return min(max(self._poll_seconds, num_documents / 1000), MAX_POLL_SECONDS)

    def _compare(self, document: DocumentProgress) -> None:
        last = self._last.get(document.id)
        if document == last or (last is not None and last.is_finished):
            return
        self._last[document.id] = document
        for listener in self._listeners:
            if document.is_finished:
                listener.finished(document)
            else:
                listener.changed(document)

    def _open_streams(self, documents: Sequence[DocumentProgress]) -> None:
        unfinished = [document for document in documents if not document.is_finished]
        streaming = sum(document.id in self._streams for document in unfinished)
        for document in unfinished:
            job_id, streamed = document.streaming_job_id, self._streams.get(document.id)
            if job_id is None or job_id == streamed:
                continue
            if streamed is not None:
                for listener in self._listeners:
                    listener.restarted(document.id)
            elif streaming >= MAX_STREAMS:
                continue
            else:
                streaming += 1
            self._streams[document.id] = job_id
            Thread(target=self._read, args=(document.id, job_id), name=f"stream-{job_id}", daemon=True).start()

    def _read(self, document_id: str, job_id: str) -> None:
        try:
            for text in self._job(job_id).texts():
                self._news.put(_Piece(document_id, job_id, text))
        except ClientError as error:  # the run goes on, and its summary comes with the document
            is_early = isinstance(error, ApiError) and error.status == _NOT_FOUND
            self._news.put(_Early(document_id, job_id) if is_early else _Broken(document_id, str(error)))

    def _relay_until(self, end: float) -> None:
        with suppress(Empty):
            while True:
                self._relay(self._news.get(timeout=max(end - time.monotonic(), 0.0)))

    def _relay(self, news: _Piece | _Early | _Broken) -> None:
        document = self._last[news.document_id]
        if document.is_finished:
            return
        if isinstance(news, _Early):
            if self._streams[news.document_id] == news.job_id:
                del self._streams[news.document_id]  # the next look opens it again
            return
        for listener in self._listeners:
            if isinstance(news, _Broken):
                listener.noted(f"{document.name}: its summary is not shown as it is written: {news.reason}")
            elif news.job_id == self._streams.get(news.document_id):
                listener.piece(news.document_id, news.text)
