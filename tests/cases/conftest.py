"""Fixtures of the cases: the tiny model on the path that forgives nothing, and the service from end to end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import LoadedModel
from engine.errors import InvalidConfig, ModelLoadError
from engine.weights import resolve
from tests.cases.service import Service, serve
from tests.cases.trial import Trial
from tests.conftest import skip_or_fail
from tests.engine.runner_aids import load
from tests.models import make_tiny_model


def load_native(folder: Path | str, **config: Any) -> LoadedModel:
    num_threads = torch.get_num_threads()
    try:
        return load(folder, cpu_kernels="native", **config)
    except InvalidConfig as error:
        skip_or_fail(str(error))
        raise
    finally:
        torch.set_num_threads(num_threads)  # one that was asked for here holds for the native path alone


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    """A tiny Llama on the native path, bitwise invariant."""
    return load_native(tiny_folder, num_threads=1)


@pytest.fixture(scope="session", params=["llama", "mistral", "gemma3_text"])
def any_tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Full attention, a sliding window, and both in turns."""
    family = str(request.param)
    return load_native(make_tiny_model(tmp_path_factory.mktemp("families") / family, family), num_threads=1)


@pytest.fixture
def trial(tiny: LoadedModel) -> Callable[..., Trial]:
    """Makes engines over the tiny model."""
    return lambda **changes: Trial(tiny, **changes)


@pytest.fixture(scope="session")
def real() -> LoadedModel:
    """SmolLM2-135M-Instruct as it is served."""
    try:
        return load_native(str(resolve("smollm2-135m")), num_kv_blocks=1024)
    except ModelLoadError as error:
        skip_or_fail(str(error))
        raise


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts a gateway and a worker with an engine of the test's own: `await service(load)`."""
    async with AsyncExitStack() as stack:

        async def start(load: Callable[[], Any], **settings: Any) -> Service:
            return await stack.enter_async_context(serve(tmp_path / "blobs", load, **settings))

        yield start
