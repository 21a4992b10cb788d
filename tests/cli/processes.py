"""Whole trees of processes in tests: started, watched, and never left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread

WAIT_SECONDS = 60.0
_MARK = "TEST_TREE_OF_MILLSTREAM"  # every process inherits it, so that all of a tree can be found
_READY = re.compile(r"ready at (http://\S+)")


def until(what: Callable[[], object], message: str = "it did not come to pass") -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not what():
        assert time.monotonic() < end, message
        time.sleep(0.02)


class Up:
    """`millstream up` in a process of its own."""

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self._known: set[tuple[int, int]] = set()  # (pid, when it was born)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "millstream", "up", *arguments],
            cwd=folder,
            env={**os.environ, **(environment or {}), _MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = Thread(target=self._read)
        self._reader.start()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def url(self) -> str:
        """The gateway's address, once everything is ready."""
        until(lambda: self._ready() or self.process.poll() is not None)
        url = self._ready()
        assert url, self.log
        return url

    def pids(self) -> list[int]:
        """Of every process of the tree that lives, itself included.

        Some programs write over their environment: those are known from when their parents lived.
        """
        processes = _processes()
        there = {pid: born for pid, (born, _) in processes.items()}
        parents = {pid: parent for pid, (_, parent) in processes.items()}
        ours = {pid for pid in there if self._is_marked(pid)}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        self._known |= {(pid, there[pid]) for pid in ours if pid in there}
        return sorted(pid for pid, born in self._known if there.get(pid) == born)

    def pid_of(self, name: str) -> int:
        """Of the one child whose command line holds `name`."""
        [pid] = [pid for pid in self.pids() if name in _command_line(pid) and pid != self.process.pid]
        return pid

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)
        return code

    def end(self) -> None:
        """Whatever happened, nothing is left."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))

    def _ready(self) -> str | None:
        match = _READY.search(self.log)
        return match[1] if match else None

    def _is_marked(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        return f"{_MARK}={self.mark}".encode() in environment.split(b"\0")


def _processes() -> dict[int, tuple[int, int]]:
    """Living processes: pid -> (when it was born, its parent); proc(5), /proc/pid/stat."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *rest = (folder / "stat").read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found[int(folder.name)] = (int(rest[17]), int(parent))
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
