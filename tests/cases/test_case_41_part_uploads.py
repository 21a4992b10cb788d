"""aioboto3 #209, s3mysqldump PR #3: an upload in parts, one of which fails, leaves a torn object or an open upload.

Kind: any step of an upload that fails, once or for good: a part in any place, its end, and the taking back itself. The
object is there byte for byte, or not at all; an open upload stays only where the store refuses to take it back, and
that is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse

from infra.blob_s3 import PART_BYTES, S3Blobs
from infra.errors import BlobUnavailable
from tests.s3_aids import BUCKET

NUM_PARTS = 3
DATA = os.urandom((NUM_PARTS - 1) * PART_BYTES + 12345)
FOREVER = 10**6


class _Raw:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self._body

    def read(self, *_: Any) -> bytes:
        return self._body


def fail(blobs: S3Blobs, operation: str, num_failures: int, *, status: int, part: int | None = None) -> None:
    """Makes calls fail on the wire, below boto's own retries: the first ones, of `part` alone where one is named."""
    left = num_failures

    def answer(request: Any, **_: Any) -> AWSResponse | None:
        nonlocal left
        if left == 0 or (part is not None and f"partNumber={part}" not in request.url):
            return None
        left -= 1
        body = b"<Error><Code>InternalError</Code><Message>no</Message></Error>"
        return AWSResponse("http://s3", status, {}, _Raw(body))

    blobs._client.meta.events.register(f"before-send.s3.{operation}", answer)


def num_open_uploads(s3: Any) -> int:
    return len(s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()))


def put(blobs: S3Blobs) -> None:
    """In pieces that are no parts."""
    blobs.put_stream("big", (DATA[start : start + 1_000_003] for start in range(0, len(DATA), 1_000_003)))


@pytest.mark.parametrize("part", range(1, NUM_PARTS + 1))
def test_a_part_that_fails_once_is_sent_again(s3: Any, part: int) -> None:
    blobs = S3Blobs(BUCKET)
    fail(blobs, "UploadPart", 1, status=500, part=part)
    put(blobs)
    assert blobs.get("big") == DATA
    assert num_open_uploads(s3) == 0


@pytest.mark.parametrize("status", [403, 500])
@pytest.mark.parametrize("part", range(1, NUM_PARTS + 1))
def test_a_part_that_always_fails_leaves_no_object_and_no_upload(s3: Any, part: int, status: int) -> None:
    blobs = S3Blobs(BUCKET)
    fail(blobs, "UploadPart", FOREVER, status=status, part=part)
    with pytest.raises(BlobUnavailable):
        put(blobs)
    assert not blobs.exists("big")
    assert num_open_uploads(s3) == 0


@pytest.mark.parametrize(("num_failures", "is_there"), [(1, True), (FOREVER, False)])
def test_the_end_of_an_upload_fails(s3: Any, num_failures: int, is_there: bool) -> None:
    blobs = S3Blobs(BUCKET)
    fail(blobs, "CompleteMultipartUpload", num_failures, status=500)
    if is_there:
        put(blobs)
        assert blobs.get("big") == DATA
    else:
        with pytest.raises(BlobUnavailable):
            put(blobs)
        assert not blobs.exists("big")
    assert num_open_uploads(s3) == 0


def test_a_failed_overwrite_keeps_what_was_there(s3: Any) -> None:
    blobs = S3Blobs(BUCKET)
    blobs.put("big", b"before")
    fail(blobs, "UploadPart", FOREVER, status=403, part=2)
    with pytest.raises(BlobUnavailable):
        put(blobs)
    assert blobs.get("big") == b"before"


@pytest.mark.parametrize("num_failures", [1, FOREVER])
def test_taking_back_fails_too(s3: Any, num_failures: int) -> None:
    """Once: it is tried again. Always: the error says that an upload stays open."""
    blobs = S3Blobs(BUCKET)
    fail(blobs, "UploadPart", FOREVER, status=403, part=2)
    fail(blobs, "AbortMultipartUpload", num_failures, status=403)
    words = "could not be aborted" if num_failures == FOREVER else "big"
    with pytest.raises(BlobUnavailable, match=words):
        put(blobs)
    assert not blobs.exists("big")
    assert num_open_uploads(s3) == (num_failures == FOREVER)
