"""Each check on a machine that lacks what it looks for: it says so, and what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.settings import StoreSettings
from millstream.doctor import checks
from millstream.doctor.checks import Finding, Level


def test_an_old_python() -> None:
    assert checks.check_python((3, 10, 9)) == Finding(
        "python", Level.PROBLEM, "3.10.9 is too old", "install Python 3.11 or newer"
    )
    assert checks.check_python((3, 11, 0)).level is Level.OK


def test_a_package_that_is_missing() -> None:
    finding = checks.check_package("no_such_package", "install it")
    assert (finding.level, finding.remedy) == (Level.PROBLEM, "install it")
    assert "No module named 'no_such_package'" in finding.detail


@pytest.mark.parametrize(
    ("free_bytes", "level"),
    [(0, Level.PROBLEM), (checks.NEEDED_FREE_BYTES, Level.WARNING), (checks.WANTED_FREE_BYTES, Level.OK)],
)
def test_disk(free_bytes: int, level: Level) -> None:
    finding = checks.judge_disk(Path("/data"), free_bytes)
    assert finding.level is level
    assert (finding.remedy is None) == (level is Level.OK)


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    assert checks.check_disk(tmp_path / "not" / "yet").name == "disk"


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = checks.check_disk(tmp_path / "file")
    assert (found.level, found.detail) == (Level.PROBLEM, f"{tmp_path / 'file'} is no folder")


def test_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000000 kB\nMemAvailable:    524288 kB\nHugePages_Total:  0\n")
    assert checks.check_memory(meminfo).level is Level.WARNING
    assert checks.check_memory(meminfo).detail == "0.5 GiB available"
    meminfo.write_text("MemAvailable: 8388608 kB\n")
    assert checks.check_memory(meminfo).level is Level.OK


def test_compiler() -> None:
    found = checks.check_compiler(lambda name: "/usr/bin/g++" if name == "g++" else None)
    assert found == Finding("compiler", Level.OK, "/usr/bin/g++")
    assert checks.check_compiler(lambda name: None).level is Level.WARNING


def test_model(tmp_path: Path) -> None:
    assert checks.check_model("fake", tmp_path).level is Level.OK
    assert checks.check_model("owner/name", tmp_path).level is Level.OK
    assert checks.check_model("smollm3", tmp_path).level is Level.PROBLEM
    missing = checks.check_model("smollm2-135m", tmp_path)
    assert (missing.level, missing.remedy) == (
        Level.WARNING, f"fetch it now: {sys.executable} -P -m engine.weights.fetch smollm2-135m",
    )  # fmt: skip
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    (tmp_path / "models" / "smollm2-135m" / "config.json").touch()
    assert checks.check_model("smollm2-135m", tmp_path).level is Level.OK


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_port_that_somebody_else_has(taken_port: int) -> None:
    finding = checks.check_port("127.0.0.1", taken_port)
    assert finding.level is Level.WARNING
    assert "Address already in use" in finding.detail


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    finding = checks.check_server(StoreSettings(redis_url="redis://:hunter2@127.0.0.1:1/0"))
    assert finding.level is Level.PROBLEM
    assert "127.0.0.1:1/0" in finding.detail
    assert "hunter2" not in finding.detail


def test_command_exit_code_and_remedies(tmp_path: Path) -> None:
    environment = {**os.environ, "MILLSTREAM_CACHE_DIR": str(tmp_path), "REDIS_URL": "redis://127.0.0.1:1/0"}
    done = subprocess.run(
        [sys.executable, "-m", "millstream", "doctor", "--port", "0", "--model", "smollm2-135m"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "warning  model" in done.stdout
    assert f"-> fetch it now: {sys.executable} -P -m engine.weights.fetch smollm2-135m" in done.stdout
    assert "problem  server    127.0.0.1:1/0" in done.stdout
    assert done.stdout.rstrip().endswith("1 of these must be mended")
    assert done.stderr == ""
