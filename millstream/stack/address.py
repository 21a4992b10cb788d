"""Where the embedded server of a running `millstream up` listens, so that other commands of this machine find it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from infra.settings import StoreSettings

_CONNECT_SECONDS = 2.0


def default_data_dir(store: StoreSettings) -> Path:
    """Where `up` keeps its data if it is not told."""
    return store.cache / "data"


def note_url(data_dir: Path, url: str) -> None:
    """Readable by its owner alone: the URL holds the server's password."""
    path = _path(data_dir)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as note:
        note.write(url)


def forget_url(data_dir: Path) -> None:
    _path(data_dir).unlink(missing_ok=True)


def running_url(data_dir: Path) -> str | None:
    """The URL of the server that keeps `data_dir` now; None where none runs (a note may be left of a killed one)."""
    try:
        url = _path(data_dir).read_text()
    except OSError:
        return None
    there = urlsplit(url)
    try:
        with socket.create_connection((there.hostname or "", there.port or 0), timeout=_CONNECT_SECONDS):
            return url
    except OSError:
        return None


def joining(store: StoreSettings) -> StoreSettings:
    """The settings, completed with the server of a running `up` where they name none."""
    if store.redis_url is not None:
        return store
    url = running_url(default_data_dir(store))
    return replace(store, redis_url=url) if url else store


def _path(data_dir: Path) -> Path:
    return data_dir / "server.url"
