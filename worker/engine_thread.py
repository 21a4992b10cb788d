"""The engine's own thread: all calls to the LLM happen here, and nothing else does.

The event loop sends commands through a queue and gets reports back; neither ever waits for the other. Between steps the
thread takes every command that has come, so an abort is in force before the next step. Idle, it waits on the queue.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest
from engine.outputs import RequestDelta
from worker.pulse import Pulse

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.params import SamplingParams
    from engine.stats import EngineStats

log = logging.getLogger(__name__)

IDLE_CHECK_SECONDS = 1.0  # idle for so long, the engine's books are checked once


@dataclass(frozen=True, slots=True)
class Add:
    """A request for the engine. `emitted` holds what earlier attempts emitted, one list of token ids per choice."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    salt: str
    tenant: str
    emitted: list[list[int]] | None


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Add | Abort | Stop


@dataclass(slots=True)
class Report:
    """What happened in the engine since the last report. Deltas of an aborted request come no later than its abort."""

    stats: EngineStats
    accepted: list[str] = field(default_factory=list)  # request ids; from here on the stats count them
    refused: dict[str, Exception] = field(default_factory=dict)  # InvalidRequest, or what should not happen
    aborted: list[str] = field(default_factory=list)
    deltas: list[RequestDelta] = field(default_factory=list)
    step_seconds: float | None = None  # None: no step was made
    busy_seconds: float = 0.0  # since the step before, or since there was something to do again


class EngineThread:
    """`deliver` and `fail` are called in the thread: with each report, and with what ended the thread."""

    def __init__(
        self,
        load: Callable[[], LLM],
        *,
        ready: Callable[[LLM], None],
        deliver: Callable[[Report], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._load = load
        self._ready = ready
        self._deliver = deliver
        self._fail = fail
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.pulse = Pulse()

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def stop(self, *, timeout_seconds: float) -> bool:
        """Asks the thread to end after the step it is in. False: it has not by then; it dies with the process."""
        self._commands.put(Stop())
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            llm = self._load()
            self._ready(llm)
            self._serve(llm)
        except BaseException as error:
            self._fail(error)

    def _serve(self, llm: LLM) -> None:
        busy_since = time.perf_counter()
        while True:
            was_idle = not llm.has_unfinished()
            commands = self._take(llm)
            if was_idle:
                busy_since = time.perf_counter()
            self.pulse.beat()
            if any(isinstance(command, Stop) for command in commands):
                return
            if commands:
                self._deliver(self._apply(llm, commands))
            if llm.has_unfinished():
                started = time.perf_counter()
                deltas = llm.step()
                now = time.perf_counter()
                seconds, busy_seconds, busy_since = now - started, now - busy_since, now
                self._deliver(Report(llm.stats(), deltas=deltas, step_seconds=seconds, busy_seconds=busy_seconds))

    def _take(self, llm: LLM) -> list[Command]:
        """Every command that is there; the next one, however long it takes, while the engine has nothing to do."""
        commands: list[Command] = []
        if not llm.has_unfinished():
            self.pulse.rest()
            commands.append(self._next_after_idleness(llm))
        try:
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _next_after_idleness(self, llm: LLM) -> Command:
        try:
            return self._commands.get(timeout=IDLE_CHECK_SECONDS)
        except queue.Empty:
            llm.check_integrity()
            return self._commands.get()

    def _apply(self, llm: LLM, commands: list[Command]) -> Report:
        accepted: list[str] = []
        refused: dict[str, Exception] = {}
        aborted: list[str] = []
        for command in commands:
            match command:
                case Add():
                    try:
                        llm.add_request(
                            command.request_id,
                            command.prompt,
                            command.params,
                            salt=command.salt,
                            tenant=command.tenant,
                            emitted=command.emitted,
                        )
                    except InvalidRequest as error:
                        refused[command.request_id] = error
                    except Exception as error:  # nothing was added; the others need not suffer
                        log.exception("%s cannot be added", command.request_id)
                        refused[command.request_id] = error
                    else:
                        accepted.append(command.request_id)
                case Abort():
                    llm.abort(command.request_id)
                    aborted.append(command.request_id)
        return Report(llm.stats(), accepted, refused, aborted)
