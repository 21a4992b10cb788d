"""One child process: its lines, its ends, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.stack.child import Child, ChildSpec
from millstream.stack.restart import MAX_DELAY_SECONDS, STEADY_SECONDS, deaths_after, delay_seconds

WAIT_SECONDS = 20.0


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


@pytest.fixture
def run() -> Iterator[Callable[..., tuple[Child, list[str]]]]:
    """Starts a Python script as a child; returns it and its log lines."""
    children = []

    def start(script: str, *, ready: str = "ready", stop_seconds: float = 10.0) -> tuple[Child, list[str]]:
        lines: list[str] = []
        spec = ChildSpec(
            name="one",
            command=[sys.executable, "-c", script],
            environment=dict(os.environ),
            ready_mark=ready,
            stop_seconds=stop_seconds,
        )
        child = Child(spec, lambda name, line: lines.append(f"{name}: {line}"))
        children.append(child)
        child.start()
        return child, lines

    yield start
    for child in children:
        child.kill()
        child.stop()


def test_lines_of_both_streams_are_passed_on_whole(run: Callable[..., tuple[Child, list[str]]]) -> None:
    child, lines = run(
        "import sys, time\n"
        "print('out', flush=True)\n"
        "sys.stderr.write('err \\u20ac\\n')\n"
        "sys.stderr.flush()\n"
        "sys.stdout.buffer.write(b'bad \\xff\\n')\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    assert child.ready.wait(WAIT_SECONDS)
    assert lines == ["one: out", "one: err €", "one: bad \ufffd", "one: ready"]


def test_a_ready_child_that_dies_is_started_again(run: Callable[..., tuple[Child, list[str]]]) -> None:
    child, lines = run("import time; print('ready', flush=True); time.sleep(60)")
    assert child.ready.wait(WAIT_SECONDS)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: lines.count("one: ready") == 2)
    assert child.num_starts == 2
    assert child.pid not in (None, first)
    assert child.failure is None
    assert any("ended with signal SIGKILL; it is started again in 0.5 s" in line for line in lines)


def test_a_child_that_dies_before_it_is_ready_has_failed(run: Callable[..., tuple[Child, list[str]]]) -> None:
    child, _ = run("print('no such model'); raise SystemExit(3)")
    until(lambda: child.failure is not None)
    assert child.failure == "ended with exit code 3"
    assert list(child.tail) == ["no such model"]
    assert child.num_starts == 1


def test_stop_is_a_request_and_no_new_start(run: Callable[..., tuple[Child, list[str]]]) -> None:
    child, lines = run(
        "import signal, sys, time\n"
        "def drain(*_):\n    print('drained', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, drain)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    assert child.ready.wait(WAIT_SECONDS)
    child.stop()
    assert lines == ["one: ready", "one: drained"]
    assert (child.pid, child.num_starts) == (None, 1)


def test_who_does_not_stop_in_time_is_killed(run: Callable[..., tuple[Child, list[str]]]) -> None:
    child, lines = run(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)",
        stop_seconds=0.2,
    )
    assert child.ready.wait(WAIT_SECONDS)
    child.stop()
    assert child.pid is None
    assert lines[-1] == "one: has not stopped within 0.2 s; it is killed"


def test_what_a_dead_child_started_dies_with_it(run: Callable[..., tuple[Child, list[str]]], tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    child, _ = run(
        "import pathlib, subprocess, sys, time\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(one.pid))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    assert child.ready.wait(WAIT_SECONDS)
    grandchild = int(note.read_text())
    child.kill()
    child.stop()
    until(lambda: not _runs(grandchild))


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_program_that_is_not_there_is_a_failure() -> None:
    spec = ChildSpec(name="one", command=["/no/such/program"], environment={}, ready_mark="ready", stop_seconds=1.0)
    child = Child(spec, lambda name, line: None)
    child.start()
    until(lambda: child.failure is not None)
    assert "could not be started" in str(child.failure)
    child.stop()


def test_restarts_slow_down_and_a_steady_life_is_forgiven() -> None:
    num_deaths, delays = 0, []
    for _ in range(12):
        num_deaths = deaths_after(num_deaths, lived_seconds=0.1)
        delays.append(delay_seconds(num_deaths))
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == MAX_DELAY_SECONDS
    assert deaths_after(num_deaths, lived_seconds=STEADY_SECONDS) == 1
    assert delay_seconds(10**6) == MAX_DELAY_SECONDS
