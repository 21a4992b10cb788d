"""Runs the scenarios, prints the table, and ends with one JSON line. Exit code 1 where a promise was broken."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.chaos.record import Record, summary, table
from bench.chaos.scenarios import SCENARIOS
from bench.chaos.yard import NotHere, Scenario, Yard
from infra.embedded import bundled_binary

RESULTS = Path(__file__).parents[1] / "results"
SHORT_SECONDS, FULL_SECONDS = 90.0, 900.0  # of one scenario, at most


def binary_of(server: str) -> Path:
    """The server program. Raises NotHere with what to install."""
    if server == "valkey":
        return bundled_binary()
    found = shutil.which("redis-server")
    if found is None:
        raise NotHere("there is no redis-server on PATH; on Debian: apt-get install redis-server")
    return Path(found)


async def run_one(name: str, scenario: Scenario, yard: Yard) -> Record:
    """A scenario's record; one that raises has broken its promise."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(SHORT_SECONDS if yard.short else FULL_SECONDS):
            record = await scenario(yard)
    except NotHere:
        raise
    except Exception as error:
        record = Record(promise=name, fault="", broken=[f"{type(error).__name__}: {error}"])
    record.seconds = round(time.monotonic() - began, 1)
    return record


async def run(
    names: list[str], *, server: str, short: bool, keep: Path | None, note: Callable[[dict[str, Record]], None]
) -> dict[str, Record]:
    """`note` is told of all records so far after each scenario."""
    binary = binary_of(server)
    records: dict[str, Record] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="millstream-chaos-") as folder:
            try:
                records[name] = await run_one(name, SCENARIOS[name], Yard(Path(folder), binary, short))
            except NotHere as reason:
                if os.environ.get("CI") == "true":
                    raise
                print(f"{name}: skipped, {reason}", flush=True)
                continue
            if keep is not None and not records[name].is_kept:
                shutil.copytree(folder, keep / name, dirs_exist_ok=True)
        note(records)
        kept = "kept" if records[name].is_kept else f"BROKEN {records[name].broken[:3]}"
        print(f"{name}: {kept} in {records[name].seconds:.0f} s", flush=True)
    return records


def write(records: dict[str, Record], *, server: str, short: bool) -> None:
    """Into the file of this server and form; scenarios that were not run again keep what is written there."""
    form = "short" if short else "full"
    path = RESULTS / f"chaos-{server}-{form}.json"
    before = msgspec.json.decode(path.read_bytes(), type=_Written).scenarios if path.exists() else {}
    written = _Written(
        server=server,
        form=form,
        num_cpus=os.cpu_count() or 0,
        python=platform.python_version(),
        scenarios={name: (before | records)[name] for name in SCENARIOS if name in before | records},
    )
    written.totals = summary(written.scenarios)
    RESULTS.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")


class _Written(msgspec.Struct, kw_only=True):
    server: str
    form: str
    num_cpus: int
    python: str
    totals: dict[str, Any] = {}
    scenarios: dict[str, Record]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few jobs a scenario instead of thousands")
    parser.add_argument("--server", choices=["valkey", "redis"], default="valkey")
    parser.add_argument("--only", choices=list(SCENARIOS), action="append", help="may be given again")
    parser.add_argument("--keep", type=Path, help="a folder for the logs of scenarios that fail")
    parser.add_argument("--write", action="store_true", help="into bench/results")
    options = parser.parse_args()

    def note(records: dict[str, Record]) -> None:
        if options.write:
            write(records, server=options.server, short=options.short)

    names = options.only or list(SCENARIOS)
    try:
        records = asyncio.run(run(names, server=options.server, short=options.short, keep=options.keep, note=note))
    except NotHere as reason:
        print(f"chaos on {options.server}: {reason}", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    print(table(records))
    print(json.dumps(summary(records)))
    return 0 if all(record.is_kept for record in records.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
