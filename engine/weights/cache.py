"""The cache of ready model folders: built aside, renamed into place, so a reader sees a whole folder or none.

<root>/wheels/                    what was downloaded
<root>/models/<name>/             one ready folder, with its manifest
<root>/models/.<name>.lock        held while a folder is built
<root>/digests.json               digests of folders outside the cache, by path, size and time
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "millstream.json"
LAYOUT_VERSION = 2  # raise it when a converted folder's contents change; older folders are then rebuilt


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a converted folder was made from, and the digests that name its numbers."""

    layout_version: int
    source_sha256: str
    weights_digest: str
    tokenizer_digest: str


def cache_root() -> Path:
    """`MILLSTREAM_CACHE_DIR`, or `~/.cache/millstream`."""
    named = os.environ.get("MILLSTREAM_CACHE_DIR")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "millstream"


def model_folder(name: str) -> Path:
    return cache_root() / "models" / name


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, or None where there is none of this version."""
    try:
        fields = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return None
    return Manifest(**fields) if fields.get("layout_version") == LAYOUT_VERSION else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


@contextmanager
def building(name: str) -> Iterator[None]:
    """Held by the one process that builds `name`; others wait here and then find it ready."""
    models = cache_root() / "models"
    models.mkdir(parents=True, exist_ok=True)
    with (models / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def publish(folder: Path, build: Callable[[Path], None]) -> None:
    """Runs `build` on an empty folder beside `folder`, then puts it in its place. A failed build leaves nothing.

    The caller holds `building`, so whatever lies beside it was left by a process that was killed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}@*"):
        shutil.rmtree(left)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}@", dir=folder.parent))
    try:
        build(aside)
        aside.chmod(0o755)
        older = aside.with_name(f"{aside.name}.older")
        if folder.exists():  # whoever has its files mapped keeps them
            folder.rename(older)
        aside.rename(folder)
        shutil.rmtree(older, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
