"""The run store's own tests run over a Cluster, too."""

from __future__ import annotations

import pytest

from tests.conftest import backend_of


@pytest.fixture(params=["memory", "redis", "cluster"])
def store_url(request: pytest.FixtureRequest) -> str:
    return backend_of(request)
