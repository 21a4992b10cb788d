"""Model folders in object storage: `s3://bucket/prefix`, streamed into the cache once per version."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Any

from engine.errors import ModelLoadError
from engine.weights.cache import building, model_folder, publish

_SUFFIXES = (".safetensors", ".json", ".jinja")


def download_folder(url: str) -> Path:
    """The cached copy of the folder at `url`; new objects (other entity tags) make a new copy.

    Endpoint and credentials come from boto3's usual places. Raises ModelLoadError.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    try:
        client = boto3.client("s3")
        objects = _list_objects(client, bucket, prefix)
        if not objects:
            raise ModelLoadError(f"{url} holds no model files ({', '.join(_SUFFIXES)})")
        version = hashlib.sha256(repr((url, sorted(objects.items()))).encode()).hexdigest()[:16]
        name = f"s3-{version}"
        folder = model_folder(name)
        with building(name):
            if not folder.exists():
                publish(folder, lambda aside: _download(client, bucket, prefix, objects, aside))
    except (BotoCoreError, ClientError) as error:
        raise ModelLoadError(
            f"could not read {url}: {error}; check the name, AWS_ENDPOINT_URL and credentials"
        ) from error
    return folder


def _list_objects(client: Any, bucket: str, prefix: str) -> dict[str, str]:
    """Key -> entity tag of the model files directly under `prefix`."""
    found: dict[str, str] = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            rest = item["Key"][len(prefix) :]
            if rest and "/" not in rest and PurePosixPath(rest).suffix in _SUFFIXES:
                found[item["Key"]] = item["ETag"]
    return found


def _download(client: Any, bucket: str, prefix: str, objects: dict[str, str], folder: Path) -> None:
    for key in objects:
        client.download_file(bucket, key, str(folder / key[len(prefix) :]))
