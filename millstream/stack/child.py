"""One process of the tree: started, its lines passed on, started again when it dies, stopped when asked."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, RLock, Thread

from millstream.stack.restart import deaths_after, delay_seconds
from millstream.tether import VARIABLE as TETHER

LogLine = Callable[[str, str], None]  # (name of the process, one line without its end)

_TAIL_LINES = 30
_MAX_LINE_BYTES = 64 * 1024
_LAST_LINES_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run and how to treat it."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    ready_mark: str  # a line that holds this says that it is ready
    stop_seconds: float  # from SIGTERM to SIGKILL


class Child:
    """Keeps one process alive in a thread of its own, which is also the thread that the process is tethered to.

    A process that ends before it was ever ready is not started again: `failure` says so.
    """

    def __init__(self, spec: ChildSpec, log: LogLine) -> None:
        self.spec = spec
        self.ready = Event()
        self.failure: str | None = None
        self.num_starts = 0
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._log = log
        self._lock = RLock()  # a signal handler may call kill() while its thread is in here
        self._stopping = Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = Thread(target=self._keep, name=f"keeper-{spec.name}", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        process = self._process
        return process.pid if process and process.returncode is None else None

    def start(self) -> None:
        self._keeper.start()

    def ask_to_stop(self) -> None:
        """SIGTERM, and no more starts."""
        with self._lock:
            self._stopping.set()
            self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it has not ended in time; returns when the process is gone."""
        self.ask_to_stop()
        if not self._keeper.is_alive():
            return
        self._keeper.join(self.spec.stop_seconds)
        if self._keeper.is_alive():
            self._log(self.spec.name, f"has not stopped within {self.spec.stop_seconds:g} s; it is killed")
            self.kill()
            self._keeper.join()

    def kill(self) -> None:
        """SIGKILL, and no more starts."""
        with self._lock:
            self._stopping.set()
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:  # reaped under the lock alone: the id is still its own
            os.kill(process.pid, number)

    def _keep(self) -> None:
        num_deaths = 0
        while True:
            process = self._spawn()
            if process is None:
                return
            born = time.monotonic()
            code = self._follow(process)
            if self._stopping.is_set():
                return
            ended = f"ended with {_describe(code)}"
            if not self.ready.is_set():
                self.failure = ended
                return
            num_deaths = deaths_after(num_deaths, time.monotonic() - born)
            pause = delay_seconds(num_deaths)
            self._log(self.spec.name, f"{ended}; it is started again in {pause:g} s")
            self._stopping.wait(pause)

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            try:
                self._process = subprocess.Popen(
                    self.spec.command,
                    env={**self.spec.environment, TETHER: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we stop the tree in order
                )
            except OSError as error:
                self.failure = f"could not be started: {error}"
                return None
            self.num_starts += 1
            return self._process

    def _follow(self, process: subprocess.Popen[bytes]) -> int:
        """Passes its lines on until it ends; returns its exit code. Nothing of its process group is left."""
        reader = Thread(target=self._read, args=(process,), name=f"reader-{self.spec.name}", daemon=True)
        reader.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not yet reaped: the group's number is still its own
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with self._lock:
            code = process.wait()
        reader.join(_LAST_LINES_SECONDS)  # a process that left our group may hold the pipe open
        return code

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            while raw := lines.readline(_MAX_LINE_BYTES):
                line = raw.decode("utf-8", "replace").rstrip()
                self.tail.append(line)
                self._log(self.spec.name, line)
                if self.spec.ready_mark in line:
                    self.ready.set()


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
