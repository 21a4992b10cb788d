"""The loss of power, for a server's append-only file: what was not synced is cut off."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.chaos.process import ChaosFailed
from bench.chaos.yard import NotHere
from infra.embedded import EmbeddedServer

SOURCE = Path(__file__).with_name("sync_log.c")


def sync_log_environment(folder: Path) -> dict[str, str]:
    """Builds the library that notes syncs; variables for the server that shall be watched."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotHere("there is no C compiler; on Debian: apt-get install gcc libc6-dev")
    library = folder / "sync_log.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CHAOS_SYNC_LOG": str(folder / "sync.log")}


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
