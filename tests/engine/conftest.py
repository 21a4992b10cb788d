"""Fixtures of the engine's tests: tiny models, and the real one."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engine.config import LoadedModel
from engine.errors import ModelLoadError
from engine.text.tokenizer import Tokenizer
from engine.weights import resolve
from tests.conftest import need_native_path
from tests.engine.runner_aids import load
from tests.models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session", params=["native", "torch"])
def cpu_kernels(request: pytest.FixtureRequest) -> str:
    """Both arithmetics in turn. Where the native one cannot be built, its tests skip; in CI they fail."""
    if request.param == "native":
        need_native_path()
    return str(request.param)


@pytest.fixture(scope="session")
def load_tiny(tiny_folder: Path, cpu_kernels: str) -> Callable[..., LoadedModel]:
    """Loads the tiny Llama anew, with settings of the test's own."""
    return partial(load, tiny_folder, cpu_kernels=cpu_kernels)


@pytest.fixture(scope="session")
def tiny_model(load_tiny: Callable[..., LoadedModel]) -> LoadedModel:
    return load_tiny(swap_space=0.01)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer(tiny_folder)


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """SmolLM2-135M-Instruct."""
    try:
        return resolve("smollm2-135m")
    except ModelLoadError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def real_tokenizer(real_folder: Path) -> Tokenizer:
    return Tokenizer(real_folder)


@pytest.fixture(scope="session", params=["auto", pytest.param("torch", marks=pytest.mark.long)])
def real_model(request: pytest.FixtureRequest, real_folder: Path) -> LoadedModel:
    """As it is served; among the long tests also by torch alone."""
    return load("smollm2-135m", num_kv_blocks=1024, cpu_kernels=request.param)
