"""One process of Millstream, started as operators start it, and reached from outside only: signals, its output."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from millstream.tether import VARIABLE as TETHER

READY_SECONDS = 300.0
POLL_SECONDS = 0.02


class ChaosFailed(Exception):
    """The harness could not do what it must; no promise is proven or broken by it."""


class Process:
    """`python -m millstream COMMAND`, its output in a file. It dies with the harness, also where that is killed."""

    def __init__(self, command: str, environment: Mapping[str, str], log_path: Path) -> None:
        self.command = command
        self.environment = environment
        self.log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def output(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    async def start(self) -> None:
        """Returns when it says that it is ready. Raises ChaosFailed where it ends before."""
        start = len(self.output)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 (asyncio's own would reap it behind our back)
                [sys.executable, "-m", "millstream", self.command],
                env={**self.environment, TETHER: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            async with asyncio.timeout(READY_SECONDS):
                while f"{self.command} ready" not in self.output[start:]:
                    if not self.is_alive:
                        raise ChaosFailed(f"{self.command} ended while it started:\n{self.output[start:][-2000:]}")
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise ChaosFailed(f"{self.command} was not ready in time:\n{self.output[start:][-2000:]}") from None

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            os.kill(self.pid, number)

    async def ended(self, *, seconds: float = 60.0) -> int:
        """Its exit code, once it has ended by itself."""
        assert self._process is not None
        async with asyncio.timeout(seconds):
            while (code := self._process.poll()) is None:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
        return code

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.ended()

    async def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        return await self.ended()

    def end(self) -> None:
        """Whatever state it is in, it is gone."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
