"""The job store's own tests run over a Cluster, too."""

from __future__ import annotations

import pytest
import redis

from infra.addresses import ClusterAddress
from tests.conftest import backend_of


@pytest.fixture(params=["memory", "redis", "cluster"])
def store_url(request: pytest.FixtureRequest) -> str:
    return backend_of(request)


@pytest.fixture(params=["redis", "cluster"])
def server_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty server, then of an empty Cluster."""
    return backend_of(request)


def operator(url: str) -> redis.Redis:
    """An operator's own connection to the same server or Cluster."""
    address = ClusterAddress.parse(url)
    if address is None:
        return redis.Redis.from_url(url)
    cluster: redis.Redis = redis.RedisCluster.from_url(address.url_of(address.hosts[0]))  # type: ignore[assignment]
    return cluster
