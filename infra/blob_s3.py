"""Blobs in S3 or what speaks like it. Endpoint, region and credentials come from boto3's usual places (`AWS_*`)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, BinaryIO, cast

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from infra.blobs import BlobEntry, checked_key
from infra.errors import BlobUnavailable, UnknownBlob

PART_BYTES = 8 * 1024 * 1024  # S3 takes no smaller parts than 5 MiB, but for the last
_NUM_ABORT_TRIES = 3


class S3Blobs:
    """Blobs under a prefix of a bucket: small ones in one request, others in parts, with no upload left open."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = _client()

    def put(self, key: str, data: bytes) -> None:
        with _translated(key):
            self._client.put_object(**self._name(key), Body=data)

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> int:
        parts = _parts(chunks)
        first = next(parts, b"")
        if len(first) < PART_BYTES:
            self.put(key, first)
            return len(first)
        with _translated(key):
            upload = {
                **self._name(key),
                "UploadId": self._client.create_multipart_upload(**self._name(key))["UploadId"],
            }
        try:
            return self._upload(upload, first, parts)
        except BaseException:
            self._abort(upload, key)
            raise

    def _upload(self, upload: dict[str, str], first: bytes, rest: Iterator[bytes]) -> int:
        num_bytes, done = 0, list[dict[str, Any]]()
        for number, part in enumerate(chain((first,), rest), start=1):  # what `rest` raises passes through
            with _translated(upload["Key"]):
                answer = self._client.upload_part(**upload, PartNumber=number, Body=part)
            done.append({"PartNumber": number, "ETag": answer["ETag"]})
            num_bytes += len(part)
        with _translated(upload["Key"]):
            self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": done})
        return num_bytes

    def _abort(self, upload: dict[str, str], key: str) -> None:
        """Takes back an upload: an open one costs money and is seen by nobody. Its error must not hide the first."""
        for tries_left in reversed(range(_NUM_ABORT_TRIES)):
            try:
                self._client.abort_multipart_upload(**upload)
                return
            except ClientError as error:
                if _is_unknown(error):
                    return
                if not tries_left:
                    raise BlobUnavailable(f"blob {key!r}: an upload stays open that could not be aborted") from error
            except BotoCoreError as error:
                if not tries_left:
                    raise BlobUnavailable(f"blob {key!r}: an upload stays open that could not be aborted") from error

    def get(self, key: str) -> bytes:
        with self.open_read(key) as body:
            return body.read()

    def open_read(self, key: str) -> BinaryIO:
        return _open(self._client, **self._name(key))

    def exists(self, key: str) -> bool:
        try:
            with _translated(key):
                self._client.head_object(**self._name(key))
        except UnknownBlob:
            return False
        return True

    def delete(self, key: str) -> None:
        with _translated(key):
            self._client.delete_object(**self._name(key))

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        pages = self._client.get_paginator("list_objects_v2")
        with _translated(prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                for item in page.get("Contents", ()):
                    key = item["Key"].removeprefix(self._prefix)
                    yield BlobEntry(key, item["Size"], item["LastModified"].timestamp())

    def _name(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + checked_key(key)}


class _Body(io.RawIOBase):
    """An answer's body as a file; a connection that breaks while it is read says so in our words."""

    def __init__(self, body: Any, key: str) -> None:
        self._body = body
        self._key = key

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _translated(self._key):
            data = self._body.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._body.close()
        super().close()


def open_object(bucket: str, key: str) -> BinaryIO:
    """Any object, to be read and closed. Raises UnknownBlob, BlobUnavailable."""
    return _open(_client(), bucket, key)


def _open(client: Any, Bucket: str, Key: str) -> BinaryIO:
    with _translated(Key):
        body = client.get_object(Bucket=Bucket, Key=Key)["Body"]
    return cast(BinaryIO, io.BufferedReader(_Body(body, Key), 256 * 1024))


def _client() -> Any:
    retries = {"mode": "standard", "max_attempts": 4}
    return boto3.client("s3", config=Config(connect_timeout=5, read_timeout=60, retries=retries))


def _parts(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Chunks joined and cut to parts of PART_BYTES; only the last is smaller. Nothing for nothing."""
    pending = bytearray()
    for chunk in chunks:
        pending += chunk
        while len(pending) >= PART_BYTES:
            yield bytes(pending[:PART_BYTES])
            del pending[:PART_BYTES]
    if pending:
        yield bytes(pending)


def _is_unknown(error: ClientError) -> bool:
    return error.response.get("Error", {}).get("Code") in ("NoSuchKey", "NoSuchUpload", "404", "NotFound")


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Turns boto's errors into ours."""
    try:
        yield
    except ClientError as error:
        if _is_unknown(error):
            raise UnknownBlob(f"no blob {key!r}") from error
        raise BlobUnavailable(f"blob {key!r}: {error}") from error
    except (BotoCoreError, HTTPClientError) as error:
        raise BlobUnavailable(f"blob {key!r}: {error}") from error
