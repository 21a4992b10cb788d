"""Digests that name a model's numbers and its tokenizer. A 500 MB file takes about a second, so they are remembered."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from engine.weights.cache import cache_root, read_manifest

_CHUNK_BYTES = 1 << 22


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def digest_of_files(paths: list[Path]) -> str:
    """One digest over names and contents, whatever the order of `paths`."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(f"{path.name}\0{sha256_of_file(path)}\n".encode())
    return digest.hexdigest()


def weights_digest(folder: Path) -> str:
    """SHA-256 over config.json and every safetensors file: the same digest means the same logits, arithmetic aside."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest.weights_digest
    return _remembered([folder / "config.json", *folder.glob("*.safetensors")])


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over tokenizer.json: the same digest means the same ids for the same text."""
    manifest = read_manifest(folder)
    return manifest.tokenizer_digest if manifest is not None else digest_of_files([folder / "tokenizer.json"])


def _remembered(paths: list[Path]) -> str:
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)]
    key = hashlib.sha256(repr(stats).encode()).hexdigest()
    book = cache_root() / "digests.json"
    known: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # no book yet, or one torn by a crash: compute again
        known = json.loads(book.read_text())
    if key not in known:
        known[key] = digest_of_files(paths)
        book.parent.mkdir(parents=True, exist_ok=True)
        aside = book.with_suffix(f".{key[:12]}")
        aside.write_text(json.dumps(known))
        aside.rename(book)
    return known[key]
