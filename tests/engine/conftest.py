"""Fixtures of the engine's tests: tiny models, and the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config import LoadedModel
from engine.errors import ModelLoadError
from engine.text.tokenizer import Tokenizer
from engine.weights import resolve
from tests.engine.runner_aids import load
from tests.models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> LoadedModel:
    return load(tiny_folder, swap_space=0.01)


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


@pytest.fixture(scope="session")
def real_model(real_folder: Path) -> LoadedModel:
    return load("smollm2-135m", num_kv_blocks=1024)
