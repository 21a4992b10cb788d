"""The embedded server of the tree, started again at the same URL when it dies."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

from infra.embedded import EmbeddedServer
from infra.errors import MillstreamError
from millstream.stack.child import LogLine
from millstream.stack.restart import deaths_after, delay_seconds


class KeptServer:
    """Keeps one embedded server alive in a thread of its own, which is also the thread that the server dies with."""

    def __init__(self, folder: Path, log: LogLine, *, directives: Sequence[str] = ()) -> None:
        self.num_starts = 0
        self._server = EmbeddedServer(folder, directives=directives)
        self._log = log
        self._lock = Lock()
        self._stopping = Event()
        self._url: Future[str] = Future()
        self._keeper = Thread(target=self._keep, name="keeper-server", daemon=True)

    @property
    def pid(self) -> int | None:
        return self._server.pid

    def start(self) -> str:
        """Starts the server and returns its URL. Raises what `EmbeddedServer.start` raises."""
        self._keeper.start()
        return self._url.result()

    def stop(self) -> None:
        """Stops the server after it has written out what it holds."""
        self._stopping.set()
        with self._lock:
            self._server.stop()
        if self._keeper.is_alive():
            self._keeper.join()

    def _keep(self) -> None:
        try:
            self._url.set_result(self._start() or "")
        except BaseException as error:
            self._url.set_exception(error)
            return
        num_deaths = 0
        while True:
            born = time.monotonic()
            self._wait_for_its_end()
            if self._stopping.is_set():
                return
            num_deaths = deaths_after(num_deaths, time.monotonic() - born)
            pause = delay_seconds(num_deaths)
            self._log("server", f"ended; it is started again in {pause:g} s (see {self._server.log_path})")
            self._stopping.wait(pause)
            try:
                self._start()
            except MillstreamError as error:
                self._log("server", str(error))

    def _start(self) -> str | None:
        """The URL; None where the server shall stop."""
        with self._lock:
            if self._stopping.is_set():
                return None
            self._server.kill()  # lets go of what a dead one held
            url = self._server.start()
            self.num_starts += 1
            return url

    def _wait_for_its_end(self) -> None:
        pid = self._server.pid
        if pid is not None:
            with suppress(ChildProcessError):  # reaped by stop()
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
