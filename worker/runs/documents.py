"""Reads a run's documents: inline texts from the blobs, others by address. Why one cannot be read is told by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from infra.blobs import Blobs
from infra.contracts import JobError
from infra.errors import BadRequest, UnknownBlob
from infra.inputs import read_uri
from infra.runs import DocumentSource

TEXT_SUFFIXES = frozenset({"", ".txt", ".md", ".text", ".markdown"})


class DocumentRefused(Exception):
    """This document cannot be summarized; the others are unhurt."""

    def __init__(self, code: str, message: str, *, num_bytes: int | None = None) -> None:
        super().__init__(message)
        self.error = JobError(code=code, message=message)
        self.num_bytes = num_bytes


def read_document(source: DocumentSource, blobs: Blobs, *, roots: Sequence[str]) -> str:
    """The document's text. Blocks. Raises DocumentRefused; BlobUnavailable where trying again may help."""
    text = _decoded(source.name, _read(source, blobs, roots))
    if not text.strip():
        num_bytes = len(text.encode())
        raise DocumentRefused("empty_document", f"{source.name} is empty: there is nothing to summarize",
                              num_bytes=num_bytes)  # fmt: skip
    return text


def _read(source: DocumentSource, blobs: Blobs, roots: Sequence[str]) -> bytes:
    try:
        if source.blob is not None:
            return blobs.get(source.blob)
        uri = source.uri or ""
        suffix = PurePosixPath(urlsplit(uri).path).suffix.lower()
        if suffix not in TEXT_SUFFIXES:
            raise DocumentRefused(
                "unsupported_type", f"{source.name}: {suffix} files cannot be read yet; send .txt or .md"
            )
        return read_uri(uri, roots=roots)
    except (BadRequest, UnknownBlob) as error:
        raise DocumentRefused(error.code, f"{source.name}: {error.message}") from error


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentRefused(
            "not_utf8",
            f"{name} is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}; convert it first",
            num_bytes=len(data),
        ) from error
