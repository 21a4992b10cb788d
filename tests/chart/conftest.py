"""Fixtures of the chart's tests."""

from __future__ import annotations

import pytest

from tests.chart.chart_render import Helm
from tests.chart.chart_tools import HELMS, helm_binary, or_skip


@pytest.fixture(scope="session", params=sorted(HELMS))
def helm(request: pytest.FixtureRequest) -> Helm:
    """Each supported helm in turn."""
    return Helm(or_skip(lambda: helm_binary(request.param)))


@pytest.fixture(scope="session")
def newest_helm() -> Helm:
    """For what cannot differ between helms."""
    return Helm(or_skip(lambda: helm_binary(max(HELMS))))
