"""The command line as a whole: light to start, one line an error, the right exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from millstream.cli import _COMMANDS, build_app, main

HEAVY = ("torch", "transformers", "litestar", "celery", "uvicorn", "boto3", "opentelemetry")


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**environment, **variables}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["worker", "--help"],
        ["up", "--help"],
        ["submit", "hello", "--url", "http://127.0.0.1:1"],
        ["jobs", "--url", "http://127.0.0.1:1"],
        ["summarize", "/no/such/file.txt", "--url", "http://127.0.0.1:1"],
    ],
)
def test_help_and_client_commands_import_nothing_heavy(arguments: list[str]) -> None:
    done = run_python(
        "import sys\n"
        "from millstream.cli import main\n"
        f"main({arguments!r})\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert done.stdout.rstrip().endswith("heavy: []"), done.stdout + done.stderr


def test_package_comes_without_its_parts() -> None:
    done = run_python(
        "import sys, millstream; print([n for n in sys.modules if n.startswith(('millstream.', 'httpx'))])"
    )
    assert done.stdout.strip() == "[]"


def test_every_command_is_there_and_told() -> None:
    app = build_app()
    for name in _COMMANDS:
        assert app[name] is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wrker"], "worker"),
        (["worker", "--max-num-seq", "3"], "--max-num-seqs"),
        (["worker", "--max-num-seqs", "three"], "--max-num-seqs"),
        (["worker", "--block-size", "7"], "block_size: is 7"),
        (["gateway", "--config", "/no/such.toml"], "/no/such.toml"),
        (["submit", "x", "--params", "[1]", "--url", "http://127.0.0.1:1"], "--params is no JSON object"),
        (["jobs", "--cancel"], "--cancel needs the id"),
        (["jobs", "--limit", "-1"], "--limit: is -1"),
        (["jobs", "--status", "done"], '"succeeded"'),
        (["summarize", "README.md", "--output", "/no/such/folder/x.jsonl"], "--output: /no/such/folder/x.jsonl"),
        (["up", "--workers", "0"], "workers: is 0"),
        (["up", "--port", "99999"], "port: is 99999"),
        (["worker", "--lease-seconds", "-1"], "lease_seconds: is -1"),
    ],
)
def test_wrong_usage_is_one_line_and_2(
    arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("millstream: ")
    assert words in line


def test_a_gateway_that_is_not_there_is_one_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "--url", "http://127.0.0.1:1"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "start one with `millstream up`" in line.lower()


def test_a_store_that_is_not_there_is_one_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["webhook-secret", "--redis-url", "redis://127.0.0.1:1/0"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "--redis-url" in line


def test_a_reader_that_leaves_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m millstream up --help | head -1",
        shell=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr
