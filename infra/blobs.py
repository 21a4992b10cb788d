"""Blobs: payloads too large for the store, inputs and outputs of runs. One interface over a folder and S3.

    blobs = open_blobs("file:///var/lib/millstream/blobs")      or "s3://bucket/prefix"

All calls block; in an event loop use `asyncio.to_thread`. Keys are relative paths of plain names. A blob is written
whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from infra.errors import BlobUnavailable, UnknownBlob

__all__ = ["BlobEntry", "BlobUnavailable", "Blobs", "UnknownBlob", "checked_key", "open_blobs"]

_NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"  # no leading dot: neither `..` nor files in the making
_KEY = re.compile(rf"{_NAME}(?:/{_NAME})*")
_MAX_KEY_LEN = 512


@dataclass(frozen=True, slots=True)
class BlobEntry:
    key: str
    num_bytes: int
    modified_at: float  # seconds since the epoch, by the blob store's clock


class Blobs(Protocol):
    """Every method may raise BlobUnavailable, and ValueError for a malformed key."""

    def put(self, key: str, data: bytes) -> None:
        """Writes a blob, over any earlier one."""
        ...

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> int:
        """Writes a blob piece by piece in bounded memory; returns its length in bytes.

        Nothing is left behind where `chunks` or the writing fails.
        """
        ...

    def get(self, key: str) -> bytes:
        """Raises UnknownBlob."""
        ...

    def open_read(self, key: str) -> BinaryIO:
        """A blob to be read bit by bit, and closed. Raises UnknownBlob; reading may raise BlobUnavailable."""
        ...

    def exists(self, key: str) -> bool: ...

    def delete(self, key: str) -> None:
        """Deletes a blob; one that is not there is deleted already."""
        ...

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        """Blobs whose key starts with `prefix`, by key."""
        ...


def checked_key(key: str) -> str:
    """`key`, if it names a place within the store. Raises ValueError."""
    if len(key) > _MAX_KEY_LEN or _KEY.fullmatch(key) is None:
        raise ValueError(f"{key[:80]!r} is no blob key: names of letters, digits, _ . - joined by /")
    return key


def open_blobs(url: str) -> Blobs:
    """The blob store at a `file://` folder, which is made, or an `s3://bucket/prefix`. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        from infra.blob_folder import FolderBlobs

        return FolderBlobs(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        from infra.blob_s3 import S3Blobs

        return S3Blobs(parts.netloc, parts.path.strip("/"))
    raise ValueError(f"{url!r} names no blob store: file:///absolute/folder or s3://bucket/prefix")
