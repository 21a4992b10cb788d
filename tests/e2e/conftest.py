"""The whole of Millstream as users run it: every process, the real model, HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.weights import resolve
from infra.settings import DispatcherSettings, WorkerSettings
from millstream.stack.settings import UpSettings
from millstream.stack.stack import Stack
from tests.conftest import skip_or_fail

MODEL = "smollm2-135m"
WEBHOOK_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stack")


@pytest.fixture(scope="session")
def stack(data_dir: Path) -> Iterator[Stack]:
    """Two workers with short leases, so that one can be killed and the other go on soon."""
    try:
        resolve(MODEL)
    except ModelLoadError as error:
        skip_or_fail(str(error))
    with Stack(
        worker=WorkerSettings(model=MODEL, lease_seconds=4.0, renew_seconds=1.0),
        engine=EngineConfig(num_threads=1, num_kv_blocks=512),
        dispatcher=DispatcherSettings(
            webhook_allow="127.0.0.1",
            webhook_secret=WEBHOOK_SECRET,
            webhook_schedule="0,0.2,0.2,0.2",
            notice_hide_seconds=2.0,
        ),
        up=UpSettings(workers=2, data_dir=data_dir),
    ) as running:
        yield running
