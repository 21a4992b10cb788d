"""What is known of each document while a run goes on, and who wants to be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DocumentProgress:
    """One document as it stands."""

    id: str
    name: str
    status: str  # as of a job: queued, running, succeeded, failed, cancelled, expired
    num_chunks: int | None = None  # None until it has been split
    num_chunks_done: int = 0
    num_chunks_failed: int = 0
    summary: str | None = None
    error: str | None = None  # why there is no summary
    failures: tuple[str, ...] = ()  # what is missing from the summary, and why
    streaming_job_id: str | None = None  # the job that writes the summary, once it is known
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        return self.status not in ("queued", "running")


class Listener:
    """Shows or keeps what happens; does nothing with what it does not override.

    Told of everything in the order in which it is noticed, from one thread.
    """

    def opened(self, documents: Sequence[DocumentProgress]) -> None:
        """The run has begun with these documents."""

    def changed(self, document: DocumentProgress) -> None:
        """Its status or its chunks have changed; it is not finished."""

    def piece(self, document_id: str, text: str) -> None:
        """The next piece of the summary that is being written. None comes after `finished`."""

    def restarted(self, document_id: str) -> None:
        """Another job writes the summary now: the pieces so far are void."""

    def finished(self, document: DocumentProgress) -> None:
        """It has a summary, or an error."""

    def noted(self, text: str) -> None:
        """Something that the person who waits should know."""

    def closed(self) -> None:
        """Nothing more comes, whether all is finished or not."""
