"""The loss of power, for a server's append-only file: what was not synced is cut off."""

from __future__ import annotations

from pathlib import Path

from bench.chaos.preload import preload
from bench.chaos.process import ChaosFailed
from infra.embedded import EmbeddedServer


def sync_log_environment(folder: Path) -> dict[str, str]:
    """Builds the library that notes syncs; variables for the server that shall be watched."""
    return {**preload("sync_log", folder), "CHAOS_SYNC_LOG": str(folder / "sync.log")}


def lose_power(server: EmbeddedServer, log_path: Path) -> int:
    """Kills the server, and cuts its append-only files at the last synced byte. How many bytes were lost."""
    server.kill()
    synced = {Path(path): int(size) for size, path in (line.split(" ", 1) for line in _lines(log_path))}
    files = list((server.folder / "appendonlydir").glob("*.incr.aof"))
    if not files or not synced:
        raise ChaosFailed("the server wrote no append-only file, or its syncs were not noted")
    lost = 0
    for file in files:
        size, kept = file.stat().st_size, synced.get(file, 0)
        lost += size - kept
        with file.open("r+b") as opened:
            opened.truncate(kept)
    return lost


def _lines(log_path: Path) -> list[str]:
    return log_path.read_text().splitlines() if log_path.exists() else []
