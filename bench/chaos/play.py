"""Runs scenarios: each in a process of its own, several beside each other where that is asked for."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from bench.chaos.record import Record
from bench.chaos.scenarios import SCENARIOS
from bench.chaos.yard import NotHere, Scenario, Yard
from infra.embedded import bundled_binary
from millstream.tether import VARIABLE as TETHER
from millstream.tether import tether

SHORT_SECONDS, FULL_SECONDS = 150.0, 1500.0  # of one scenario, at most


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


def play(name: str, binary: Path, short: bool, keep: Path | None) -> Record:
    """One scenario from an empty folder to its record; `keep` gets the folder of one that failed."""
    with tempfile.TemporaryDirectory(prefix="millstream-chaos-") as folder:
        record = asyncio.run(run_one(name, SCENARIOS[name], Yard(Path(folder), binary, short)))
        if keep is not None and not record.is_kept:
            shutil.copytree(folder, keep / name, dirs_exist_ok=True)
    return record


def run(
    names: list[str], *, server: str, short: bool, keep: Path | None, at_once: int,
    note: Callable[[dict[str, Record]], None],
) -> dict[str, Record]:  # fmt: skip
    """`at_once` scenarios at a time, each in a process of its own. `note` is told of all records after each of them."""
    binary = binary_of(server)
    records: dict[str, Record] = {}
    with ProcessPoolExecutor(
        at_once, mp_context=get_context("spawn"), initializer=tether, initargs=({TETHER: str(os.getpid())},)
    ) as pool:
        playing = {pool.submit(play, name, binary, short, keep): name for name in names}
        for played in as_completed(playing):
            name = playing[played]
            try:
                record = records[name] = played.result()
            except NotHere as reason:
                if os.environ.get("CI") == "true":
                    raise
                print(f"{name}: skipped, {reason}", flush=True)
                continue
            note(records)
            kept = "kept" if record.is_kept else f"BROKEN {record.broken[:3]}"
            print(f"{name}: {kept} in {record.seconds:.0f} s", flush=True)
    return {name: records[name] for name in names if name in records}
