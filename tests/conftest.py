"""Fixtures that all tests share: a real server of their own, and the job store over each of its backends."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis

from bench.chaos.clusters import Clustered, clustered
from infra.embedded import EmbeddedServer
from infra.errors import MillstreamError
from infra.jobs import RedisJobs
from infra.memory import MemoryJobs
from infra.store import JobStore
from kernels.cpu import library
from kernels.cpu.build import BuildUnavailable
from tests.s3_aids import BUCKET

NUM_DATABASES = 512
_database = itertools.count()


def skip_or_fail(reason: str) -> None:
    """A part that is missing skips the test here and fails it in CI, where nothing may be missing."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def need_native_path() -> None:
    """Skips, or fails in CI, where the native CPU path cannot be built."""
    try:
        library.load()
    except BuildUnavailable as error:
        skip_or_fail(str(error))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A Valkey or Redis server for this test session."""
    server = EmbeddedServer(tmp_path_factory.mktemp("server"), num_databases=NUM_DATABASES)
    try:
        server.start()
    except MillstreamError as error:
        skip_or_fail(f"no embedded server: {error}")
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: EmbeddedServer) -> str:
    """URL of an empty database of the session's server, for one test alone."""
    url = f"{redis_server.url.rsplit('/', 1)[0]}/{next(_database) % NUM_DATABASES}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clustered]:
    """A Cluster of three primaries for this test session."""
    try:
        with clustered(tmp_path_factory.mktemp("cluster"), directives=["appendonly no"]) as cluster:
            yield cluster
    except MillstreamError as error:
        skip_or_fail(f"no embedded server: {error}")


@pytest.fixture
def cluster_url(redis_cluster: Clustered) -> str:
    """URL of the session's Cluster, empty, for one test alone."""
    redis_cluster.flush()
    return redis_cluster.url


def backend_of(request: pytest.FixtureRequest) -> str:
    """`memory`, or the URL of an empty server or Cluster, as the fixture's parameter says."""
    fixtures = {"redis": "redis_url", "cluster": "cluster_url"}
    return "memory" if request.param == "memory" else str(request.getfixturevalue(fixtures[request.param]))


@pytest.fixture(params=["memory", "redis"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Which backend a test runs on. The stores' own tests run over a Cluster, too."""
    return backend_of(request)


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[JobStore]:
    """An empty job store, over each backend in turn."""
    opened: JobStore
    if store_url == "memory":
        opened = MemoryJobs()
    else:
        opened = await RedisJobs.connect(store_url)
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # slow to import

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An S3 client; boto3's environment names the server. The bucket is empty."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    for upload in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    return client
