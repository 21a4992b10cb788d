"""The processes of the other ranks, as rank 0 sees them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import weakref
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.errors import DeviceFailed
from engine.parallel.frames import read_frame, write_frame
from engine.parallel.order import StepOrder
from engine.parallel.rank import RankSetup

_GRACE_SECONDS = 10.0  # for a rank to end by itself


class Ranks:
    """Starts the ranks 1 .. size - 1; they end with this object, or with this process."""

    def __init__(self, folder: Path, config: EngineConfig, port: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "engine.parallel.rank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(1, config.tensor_parallel_size)
        ]
        self._closed = weakref.finalize(self, _end, self._processes)
        for rank, process in enumerate(self._processes, start=1):
            self._tell(rank, process, msgspec.msgpack.encode(RankSetup(rank, port, str(folder), config)))

    def send(self, order: StepOrder) -> None:
        """Raises DeviceFailed where a rank is gone."""
        frame = msgspec.msgpack.encode(order)
        for rank, process in enumerate(self._processes, start=1):
            self._tell(rank, process, frame)

    def loss(self, error: Exception) -> DeviceFailed:
        """What became of the ranks, for an exchange with them that failed with `error`."""
        for rank, process in enumerate(self._processes, start=1):
            try:
                code = process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            return DeviceFailed(f"rank {rank} of {len(self._processes) + 1} ended ({_why(process, code)})")
        return DeviceFailed(f"the ranks no longer answer each other: {error}")

    def close(self) -> None:
        self._closed()

    def _tell(self, rank: int, process: subprocess.Popen[bytes], frame: bytes) -> None:
        assert process.stdin is not None
        try:
            write_frame(process.stdin, frame)
        except OSError as error:
            raise self.loss(error) from error


def _why(process: subprocess.Popen[bytes], code: int) -> str:
    assert process.stdout is not None
    told = read_frame(process.stdout)
    return told.decode() if told else f"exit code {code}, without a word"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.stdin is not None and process.poll() is None:
            with contextlib.suppress(OSError):  # it is gone, and what was not written with it
                process.stdin.close()
    for process in processes:
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
