"""Blobs over a folder and over S3 (moto's server): whole or not at all, and nowhere else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.blob_s3 import PART_BYTES
from infra.blobs import Blobs, open_blobs
from infra.errors import BadRequest, BlobUnavailable, UnknownBlob
from infra.inputs import read_uri
from tests.s3_aids import BUCKET


@pytest.fixture(params=["file", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "file":
        return open_blobs((tmp_path / "blobs").as_uri())
    request.getfixturevalue("s3")
    return open_blobs(f"s3://{BUCKET}/some/prefix")


def test_what_is_put_is_got(blobs: Blobs) -> None:
    blobs.put("jobs/one.bin", b"first")
    blobs.put("jobs/one.bin", b"second")
    assert blobs.get("jobs/one.bin") == b"second"
    assert blobs.exists("jobs/one.bin") and not blobs.exists("jobs/two.bin") and not blobs.exists("jobs")
    with blobs.open_read("jobs/one.bin") as file:
        assert (file.read(3), file.read()) == (b"sec", b"ond")
    blobs.put("empty", b"")
    assert blobs.get("empty") == b""


def test_what_is_deleted_is_gone(blobs: Blobs) -> None:
    blobs.put("one", b"1")
    blobs.delete("one")
    blobs.delete("one")
    assert not blobs.exists("one")
    for read in (blobs.get, blobs.open_read):
        with pytest.raises(UnknownBlob):
            read("one")


def test_lists_by_prefix(blobs: Blobs) -> None:
    for key in ("b/2", "a/1", "b/1", "bc"):
        blobs.put(key, key.encode())
    assert [(entry.key, entry.num_bytes) for entry in blobs.list("b/")] == [("b/1", 3), ("b/2", 3)]
    assert [entry.key for entry in blobs.list()] == ["a/1", "b/1", "b/2", "bc"]
    assert all(entry.modified_at > 1.6e9 for entry in blobs.list())


@pytest.mark.parametrize("num_bytes", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
def test_streams_are_written_whole(blobs: Blobs, num_bytes: int) -> None:
    data = os.urandom(1021) * (num_bytes // 1021 + 1)
    data = data[:num_bytes]
    chunks = (data[start : start + 99_991] for start in range(0, num_bytes, 99_991))
    assert blobs.put_stream("streamed", chunks) == num_bytes
    assert blobs.get("streamed") == data


def test_a_stream_that_fails_leaves_nothing(blobs: Blobs) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * (PART_BYTES + 1)
        raise FileNotFoundError("the source broke")

    with pytest.raises(FileNotFoundError, match="the source broke"):
        blobs.put_stream("broken", chunks())
    assert not blobs.exists("broken")
    assert list(blobs.list()) == []


def test_a_failed_overwrite_keeps_what_was_there(blobs: Blobs) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise RuntimeError

    blobs.put("key", b"old")
    with pytest.raises(RuntimeError):
        blobs.put_stream("key", chunks())
    assert blobs.get("key") == b"old"


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../up", "a/../../up", "a//b", "a/", ".hidden", "a/.part", "a\\b", "a\0b", "a b", "x" * 600],
)
def test_keys_that_lead_elsewhere_are_refused(blobs: Blobs, key: str) -> None:
    calls: list[Callable[[str], Any]] = [blobs.get, blobs.exists, blobs.delete, lambda key: blobs.put(key, b"x")]
    for call in calls:
        with pytest.raises(ValueError, match="no blob key"):
            call(key)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    blobs = open_blobs((tmp_path / "blobs").as_uri())
    (tmp_path / "blobs" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "blobs" / "folder").symlink_to(tmp_path)
    for key in ("link", "folder/secret"):
        with pytest.raises(ValueError, match="by a link"):
            blobs.get(key)


def test_writers_of_one_key_never_mix(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path.as_uri())
    values = [bytes([n]) * 200_000 for n in range(8)]
    threads = [threading.Thread(target=blobs.put, args=("key", value)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert blobs.get("key") in values
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("url", ["", "blobs", "file://host/x", "file:relative", "s3://", "ftp://x/y"])
def test_urls_that_name_no_store(url: str) -> None:
    with pytest.raises(ValueError, match="names no blob store"):
        open_blobs(url)


def test_an_unreachable_server_is_unavailable(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    blobs = open_blobs(f"s3://{BUCKET}/x")
    for call in (
        lambda: blobs.put("k", b"v"),
        lambda: blobs.get("k"),
        lambda: blobs.exists("k"),
        lambda: list(blobs.list()),
    ):
        with pytest.raises(BlobUnavailable):
            call()


def test_a_missing_bucket_is_no_missing_blob(s3: Any) -> None:
    blobs = open_blobs("s3://no-such-bucket/x")
    with pytest.raises(BlobUnavailable):
        blobs.put("k", b"v")
    with pytest.raises(ClientError):
        s3.head_bucket(Bucket="no-such-bucket")


# --- inputs by address ---


def test_inputs_are_read_under_their_roots(tmp_path: Path, s3: Any) -> None:
    (tmp_path / "in").mkdir()
    document = tmp_path / "in" / "a document.txt"
    document.write_text("text")
    s3.put_object(Bucket=BUCKET, Key="docs/a.txt", Body=b"object")
    roots = [str(tmp_path / "in"), f"s3://{BUCKET}/docs"]
    assert read_uri(document.as_uri(), roots=roots) == b"text"
    assert read_uri(f"s3://{BUCKET}/docs/a.txt", roots=roots) == b"object"
    assert read_uri(document.as_uri(), roots=[(tmp_path / "in").as_uri()]) == b"text"
    for uri in (document.with_name("none.txt").as_uri(), f"s3://{BUCKET}/docs/none.txt"):
        with pytest.raises(UnknownBlob):
            read_uri(uri, roots=roots)
    with pytest.raises(BadRequest, match="larger than 3 bytes"):
        read_uri(document.as_uri(), roots=roots, max_bytes=3)


def test_inputs_elsewhere_are_refused(tmp_path: Path, s3: Any) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "x").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "in" / "pipe")
    s3.put_object(Bucket=BUCKET, Key="docs2/a.txt", Body=b"secret")
    roots = [str(tmp_path / "in"), f"s3://{BUCKET}/docs"]
    for uri in (
        (tmp_path / "secret").as_uri(),
        (tmp_path / "inside" / "x").as_uri(),
        (tmp_path / "in" / "link").as_uri(),
        (tmp_path / "in" / "pipe").as_uri(),
        (tmp_path / "in").as_uri() + "/../secret",
        (tmp_path / "in").as_uri() + "/%2e%2e/secret",
        (tmp_path / "in").as_uri() + "/%00",
        (tmp_path / "in").as_uri(),
        f"s3://{BUCKET}/docs2/a.txt",
        "s3://other/docs/a.txt",
        f"s3://{BUCKET}",
        "http://localhost/x",
        "file://elsewhere/x",
        "/etc/passwd",
        "",
    ):
        with pytest.raises(BadRequest):
            read_uri(uri, roots=roots)
    with pytest.raises(BadRequest):
        read_uri((tmp_path / "secret").as_uri(), roots=[])
    with pytest.raises(BadRequest):
        read_uri((tmp_path / "secret").as_uri(), roots=[""])
