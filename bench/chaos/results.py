"""What is written of the scenarios: a file in `bench/results` a server and form, kept up scenario by scenario."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import msgspec

from bench.chaos.record import Record, summary
from bench.chaos.scenarios import SCENARIOS

RESULTS = Path(__file__).parents[1] / "results"


def write(records: dict[str, Record], *, server: str, short: bool) -> None:
    """Into the file of this server and form; scenarios that were not run again keep what is written there."""
    path, before = _path(server, short), written(server=server, short=short)
    file = _Written(
        server=server,
        form="short" if short else "full",
        num_cpus=os.cpu_count() or 0,
        python=platform.python_version(),
        scenarios={name: (before | records)[name] for name in SCENARIOS if name in before | records},
    )
    file.totals = summary(file.scenarios)
    RESULTS.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(file)) + b"\n")


def written(*, server: str, short: bool) -> dict[str, Record]:
    """The records of this server and form that are written; none where nothing is."""
    path = _path(server, short)
    return msgspec.json.decode(path.read_bytes(), type=_Written).scenarios if path.exists() else {}


def _path(server: str, short: bool) -> Path:
    return RESULTS / f"chaos-{server}-{'short' if short else 'full'}.json"


class _Written(msgspec.Struct, kw_only=True):
    server: str
    form: str
    num_cpus: int
    python: str
    totals: dict[str, Any] = {}
    scenarios: dict[str, Record]
