"""Model folders in object storage, against a real S3 protocol server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.weights import resolve
from tests.engine.runner_aids import load
from tests.models import make_tiny_model


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no S3 server: {error}")
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client on an empty bucket `models`; the engine's own client finds the same server through its environment."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    yield client
    for item in client.list_objects_v2(Bucket="models").get("Contents", []):
        client.delete_object(Bucket="models", Key=item["Key"])
    client.delete_bucket(Bucket="models")


def put(client: Any, folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        client.upload_file(str(path), "models", f"{prefix}{path.name}")


@pytest.mark.parametrize("prefix", ["tiny/v1/", ""])
def test_a_folder_in_a_bucket_loads(bucket: Any, tiny_folder: Path, prefix: str) -> None:
    put(bucket, tiny_folder, prefix)
    bucket.put_object(Bucket="models", Key=f"{prefix}notes.txt", Body=b"not a model file")
    bucket.put_object(Bucket="models", Key=f"{prefix}deeper/config.json", Body=b"{}")
    folder = resolve(f"s3://models/{prefix}")
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in tiny_folder.iterdir())
    for path in tiny_folder.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert load(f"s3://models/{prefix}").info.vocab_size == 320


def test_it_is_fetched_once_per_version(bucket: Any, tiny_folder: Path, tmp_path: Path) -> None:
    put(bucket, tiny_folder, "m/")
    first = resolve("s3://models/m")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve("s3://models/m") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    put(bucket, make_tiny_model(tmp_path / "newer", seed=3), "m/")
    assert resolve("s3://models/m") != first


def test_what_is_not_there_is_said(bucket: Any) -> None:
    with pytest.raises(ModelLoadError, match="no model files"):
        resolve("s3://models/none")
    with pytest.raises(ModelLoadError, match="no-such-bucket"):
        resolve("s3://no-such-bucket/m")


def test_a_download_that_breaks_leaves_nothing(bucket: Any, tiny_folder: Path, tmp_path: Path) -> None:
    put(bucket, tiny_folder, "m/")
    from engine.weights import s3

    original = s3._list_objects
    try:
        s3._list_objects = lambda *arguments: {**original(*arguments), "m/gone.json": "x"}
        with pytest.raises(ModelLoadError, match="s3://models/m"):
            resolve("s3://models/m")
    finally:
        s3._list_objects = original
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir() if not path.name.endswith(".lock")]
    assert left == []
    assert resolve("s3://models/m").is_dir()
