"""From what an operator writes (`--model`) to a ready folder on this machine."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from engine.errors import ModelLoadError
from engine.weights.cache import LAYOUT_VERSION, building, model_folder, publish, read_manifest
from engine.weights.catalog import CATALOG

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


def resolve(model: str) -> Path:
    """The folder of an alias, a local folder, a .gguf file, an `s3://bucket/prefix` or a hub id (`owner/name`).

    Raises ModelLoadError where there is none, or where it holds no safetensors.
    """
    if model in CATALOG:
        from engine.weights.fetch import fetch  # here, so that `python -m engine.weights.fetch` imports itself once

        return fetch(model)
    if model.startswith("s3://"):
        from engine.weights.s3 import download_folder

        return check_folder(download_folder(model))
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path)
    if model and path.is_dir():
        return check_folder(path)
    if _HUB_ID.fullmatch(model) and not model.startswith("."):
        return check_folder(_from_hub(model))
    raise ModelLoadError(
        f"no model {model!r}: it is neither an alias ({', '.join(CATALOG)}), nor a folder or .gguf file here, "
        "nor s3://bucket/prefix, nor a hub id (owner/name)"
    )


def check_folder(folder: Path) -> Path:
    """`folder`, if it holds what loading needs."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelLoadError(f"{folder} has no {name}")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        hint = f"; {pickled[0]} is a pickle, which is never loaded: save it as safetensors" if pickled else ""
        raise ModelLoadError(f"{folder} has no *.safetensors{hint}")
    return folder


def _converted(path: Path) -> Path:
    from engine.weights.gguf import convert_gguf

    stat = path.stat()
    key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{LAYOUT_VERSION}"
    name = f"gguf-{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    folder = model_folder(name)
    with building(name):
        if read_manifest(folder) is None:
            publish(folder, lambda aside: convert_gguf(path, aside))
    return folder


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client raises its own, HTTP's and the system's errors alike
        raise ModelLoadError(
            f"could not fetch {model!r} from the hub ({error}); set HF_TOKEN for a gated model, or give a local folder"
        ) from error
