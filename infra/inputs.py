"""Inputs that callers name by address: `file://` and `s3://`, only under roots that the operator allows."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.errors import BadRequest, BlobUnavailable, UnknownBlob

MAX_INPUT_BYTES = 256 * 1024 * 1024


def read_uri(uri: str, *, roots: Sequence[str], max_bytes: int = MAX_INPUT_BYTES) -> bytes:
    """The bytes at `uri`. Blocks.

    `roots` are folders (`/data`, `file:///data`) and `s3://bucket/prefix`: what lies under none of them is refused
    before it is looked at. Raises BadRequest, UnknownBlob, BlobUnavailable.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return _read_file(uri, Path(unquote(parts.path)), roots, max_bytes)
    if parts.scheme == "s3" and parts.netloc and parts.path.strip("/"):
        return _read_s3(uri, parts.netloc, parts.path.lstrip("/"), roots, max_bytes)
    raise BadRequest(f"{uri[:200]!r} is no file:///path or s3://bucket/key", param="uri")


def _read_file(uri: str, path: Path, roots: Sequence[str], max_bytes: int) -> bytes:
    folders = [Path(root.removeprefix("file://")).resolve() for root in roots if not root.startswith("s3://") and root]
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte
        raise BadRequest(f"{uri[:200]!r} is no usable path: {error}", param="uri") from error
    if not any(real.is_relative_to(folder) for folder in folders):
        raise BadRequest(
            f"{uri[:200]!r} is under none of the folders that this service may read (MILLSTREAM_FILE_ROOTS)",
            param="uri",
        )
    try:
        # Without blocking, so that a pipe in the folder cannot hold the reader up.
        fd = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnknownBlob(f"{uri[:200]!r} is not there", param="uri") from error
    except OSError as error:
        raise BlobUnavailable(f"{uri[:200]!r} cannot be read: {error.strerror}", param="uri") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadRequest(f"{uri[:200]!r} is no plain file", param="uri")
    with os.fdopen(fd, "rb") as file:
        return _bounded(uri, file.read(max_bytes + 1), max_bytes)


def _read_s3(uri: str, bucket: str, key: str, roots: Sequence[str], max_bytes: int) -> bytes:
    prefixes = [root.rstrip("/") for root in roots if root.startswith("s3://")]
    if not any(f"s3://{bucket}/{key}".startswith(f"{prefix}/") for prefix in prefixes):
        raise BadRequest(
            f"{uri[:200]!r} is under none of the buckets that this service may read (MILLSTREAM_S3_ROOTS)", param="uri"
        )
    from infra.blob_s3 import open_object

    with open_object(bucket, key) as body:
        return _bounded(uri, body.read(max_bytes + 1), max_bytes)


def _bounded(uri: str, data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise BadRequest(f"{uri[:200]!r} is larger than {max_bytes} bytes", param="uri")
    return data
