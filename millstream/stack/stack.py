"""All processes as one tree: embedded server, gateway, workers, dispatcher, pipelines.

    up ─┬─ valkey-server        keeps everything; its data survives a restart
        ├─ gateway              HTTP
        ├─ worker, worker-2 …   the engine
        ├─ pipelines            steps of runs
        └─ dispatcher           outbox, webhooks, sweeps

The tree is stopped in the order gateway, workers, pipelines, dispatcher, server, so that each can still tell the next
what it knows; and no process of it outlives this one, even where this one is killed.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

import httpx

from engine.config import EngineConfig
from infra.ports import free_port
from infra.settings import (
    DispatcherSettings,
    GatewaySettings,
    PipelineSettings,
    QueueSettings,
    StoreSettings,
    WorkerSettings,
)
from millstream.environment import environment_of
from millstream.errors import CommandError
from millstream.stack.address import default_data_dir, forget_url, note_url
from millstream.stack.child import Child, ChildSpec, LogLine
from millstream.stack.server import KeptServer
from millstream.stack.settings import UpSettings

_STOP_ORDER = ("gateway", "worker", "pipelines", "dispatcher")  # then the server
_POLL_SECONDS = 0.05
_STOP_GRACE_SECONDS = 15.0  # beyond what a process grants itself


class StackFailed(CommandError):
    """The stack could not be started."""


def print_line(name: str, line: str) -> None:
    """One log line, prefixed by the process it comes from."""
    print(f"{name:>10} | {line}", flush=True)


class Stack:
    """`with Stack(...) as stack: ... stack.url ...` runs the whole of Millstream while the block lasts."""

    def __init__(
        self,
        *,
        store: StoreSettings | None = None,
        queue: QueueSettings | None = None,
        gateway: GatewaySettings | None = None,
        worker: WorkerSettings | None = None,
        engine: EngineConfig | None = None,
        dispatcher: DispatcherSettings | None = None,
        pipelines: PipelineSettings | None = None,
        up: UpSettings | None = None,
        log: LogLine = print_line,
    ) -> None:
        self.store = store or StoreSettings()
        self.queue = queue or QueueSettings()
        self.gateway = gateway or GatewaySettings(port=0)
        self.worker = worker or WorkerSettings()
        self.engine = engine or EngineConfig()
        self.dispatcher = dispatcher or DispatcherSettings()
        self.pipelines = pipelines or PipelineSettings()
        self.up = up or UpSettings()
        self.data_dir = self.up.data_dir or default_data_dir(self.store)
        self.server: KeptServer | None = None  # None where the settings name another
        self._groups: dict[str, list[Child]] = {}  # command -> its processes
        self._log_line = log
        self._log_lock = Lock()

    @property
    def url(self) -> str:
        """Of the gateway."""
        host = "127.0.0.1" if self.gateway.host in ("0.0.0.0", "") else self.gateway.host
        return f"http://[{host}]:{self.gateway.port}" if ":" in host else f"http://{host}:{self.gateway.port}"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts everything and returns when it is ready to serve. Raises StackFailed with the reason."""
        began = time.monotonic()
        if self.gateway.port == 0:
            self.gateway = replace(self.gateway, port=free_port(self.gateway.host))
        self._serve_store()
        for spec in self._specs():
            child = Child(spec, self._log)
            self._groups.setdefault(spec.command[-1], []).append(child)
            child.start()
        self._wait_until_ready(began + self.up.ready_seconds)
        self._log("up", f"ready at {self.url} in {time.monotonic() - began:.1f} s")

    def stop(self) -> None:
        """Stops everything in order; returns when nothing is left. Harmless where it has been called before."""
        for command in _STOP_ORDER:
            group = self._groups.get(command, [])
            if any(child.pid is not None for child in group):
                self._log("up", f"stopping {', '.join(child.spec.name for child in group)}")
            for child in group:
                child.ask_to_stop()  # all workers drain at the same time
            for child in group:
                child.stop()
        if self.server is not None:
            if self.server.num_starts > 0:  # else the note is of another tree that uses the folder
                forget_url(self.data_dir)
            self.server.stop()

    def kill(self) -> None:
        """Ends every process at once. What was running is continued by the next start."""
        for child in self.children:
            child.kill()

    @property
    def children(self) -> list[Child]:
        return [child for group in self._groups.values() for child in group]

    @property
    def pids(self) -> list[int]:
        """Of every process of the tree but this one."""
        pids = [child.pid for child in self.children]
        if self.server is not None:
            pids.append(self.server.pid)
        return [pid for pid in pids if pid is not None]

    def _serve_store(self) -> None:
        """Starts the embedded server, unless the settings name another."""
        if self.store.redis_url is None:
            _make_folder(self.data_dir)
            directives = ["appendfsync always"] if self.store.durability == "fsync" else []
            self.server = KeptServer(self.data_dir / "store", self._log, directives=directives)
            url = self.server.start()
            note_url(self.data_dir, url)
            self.store = replace(self.store, redis_url=url)
            self._log("up", f"embedded server started, its data in {self.data_dir}")
        if self.up.data_dir is not None and self.store.blob_url is None:
            self.store = replace(self.store, blob_url=(self.data_dir / "blobs").absolute().as_uri())

    def _specs(self) -> Iterator[ChildSpec]:
        """The processes, in the order of their start."""
        yield self._spec("gateway", self.gateway, stop_seconds=self.gateway.shutdown_seconds)
        for number in range(1, self.up.workers + 1):
            name = "worker" if number == 1 else f"worker-{number}"
            yield self._spec("worker", self.worker, self.engine, name=name, stop_seconds=self.worker.drain_seconds)
        yield self._spec("pipelines", self.pipelines, stop_seconds=0.0)
        yield self._spec("dispatcher", self.dispatcher, stop_seconds=0.0)

    def _spec(self, command: str, *settings: object, stop_seconds: float, name: str | None = None) -> ChildSpec:
        return ChildSpec(
            name=name or command,
            # -P: a folder named like one of our packages where `up` was called must not be taken for it
            command=[sys.executable, "-P", "-m", "millstream", command],
            environment=environment_of(self.store, self.queue, *settings, base=os.environ),
            ready_mark=f"{command} ready",
            stop_seconds=stop_seconds + _STOP_GRACE_SECONDS,
        )

    def _wait_until_ready(self, deadline: float) -> None:
        while True:
            for child in self.children:
                if child.failure is not None:
                    raise StackFailed(f"{child.spec.name} {child.failure}: {_last_words(child)}")
            waiting = [child.spec.name for child in self.children if not child.ready.is_set()]
            if not waiting:
                reason = _why_not_ready(self.url)
                if reason is None:
                    return
                waiting = [f"gateway ({reason})"]
            if time.monotonic() > deadline:
                raise StackFailed(
                    f"not ready within {self.up.ready_seconds:g} s (--ready-seconds): waiting for {', '.join(waiting)}"
                )
            time.sleep(_POLL_SECONDS)

    def _log(self, name: str, line: str) -> None:
        with self._log_lock:
            self._log_line(name, line)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise StackFailed(
            f"{folder} cannot be written: {error.strerror}; name another folder with --data-dir or MILLSTREAM_CACHE_DIR"
        ) from error


def _why_not_ready(url: str) -> str | None:
    """None where the gateway says that it can serve, else why not."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=5.0, trust_env=False)
    except httpx.TransportError as error:
        return str(error)
    return None if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"


def _last_words(child: Child) -> str:
    """The last line it printed, which with our processes is the reason."""
    lines = [line for line in child.tail if line.strip()]
    return lines[-1].removeprefix("millstream: ") if lines else "it printed nothing"
