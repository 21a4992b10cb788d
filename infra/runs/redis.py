"""The run store in Redis or Valkey.

All keys of a run share the hash tag of its id; the clock of runs is one sorted set in a slot of its own, so `create`
writes the record first and the clock after: a retry completes what a crash interrupted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from infra.connect import Server
from infra.contracts import JobError, pack
from infra.node import Argument
from infra.runs import scripts
from infra.runs.records import DocumentSource, DocumentState, NewRun, RunHeader
from infra.runs.store import Document, DocumentUpdate, Written
from infra.runs.views import RunView, view_of
from infra.script_caller import ScriptCaller
from infra.states import TERMINAL, Status

CLOCK = "ms:runs:due"
KEEP_SECONDS = 30 * 24 * 3600  # finished runs and their summaries


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Keys of one run."""

    run_id: str

    @property
    def prefix(self) -> str:
        return f"ms:{{{self.run_id}}}"

    @property
    def run(self) -> str:
        """Hash: record, status, times, counters."""
        return f"{self.prefix}:run"

    @property
    def sources(self) -> str:
        """Hash: document number -> DocumentSource."""
        return f"{self.prefix}:sources"

    @property
    def states(self) -> str:
        """Hash: document number -> DocumentState. A document without one has not been touched."""
        return f"{self.prefix}:states"

    @property
    def versions(self) -> str:
        """Hash: document number -> version of its state."""
        return f"{self.prefix}:versions"

    @property
    def texts(self) -> str:
        """Hash: "number:item" -> summary."""
        return f"{self.prefix}:texts"

    @property
    def open(self) -> str:
        """Sorted set: numbers of documents that are not finished."""
        return f"{self.prefix}:open"

    @property
    def fed(self) -> str:
        """Set: "number:item" of items in the window."""
        return f"{self.prefix}:fed"

    @property
    def unfed(self) -> str:
        """Hash: document number -> its items still to be fed; without an entry 1. The run's `unfed` is the sum."""
        return f"{self.prefix}:unfed"

    @property
    def all(self) -> list[str]:
        return [self.run, self.sources, self.states, self.versions, self.texts, self.open, self.fed, self.unfed]


class RedisRuns:
    def __init__(self, server: Server) -> None:
        """`close` closes the server's connections too."""
        self._server = server
        self._scripts = ScriptCaller(server)

    @classmethod
    def open(cls, url: str) -> RedisRuns:
        """Over connections of its own, made when needed. Whether the server is fit, the job store has found out."""
        return cls(Server(url))

    async def create(self, run: NewRun) -> bool:
        run.check()
        keys = RunKeys(run.id)
        record = pack(msgspec.structs.replace(run, documents=[]))
        sources = [pack(source) for source in run.documents]
        is_new = bool(await self._scripts.call(scripts.CREATE, [keys.run, keys.sources, keys.open], [record, *sources]))
        header = None if is_new else await self.header(run.id)
        if header is None or not header.is_finished:
            await self.wake(run.id)
        return is_new

    async def get(self, run_id: str) -> RunView | None:
        keys = RunKeys(run_id)
        names = [keys.run, keys.sources, keys.states, keys.versions]
        found = await self._scripts.call(scripts.READ, names, [])
        fields, sources, states, versions = (dict(zip(flat[::2], flat[1::2], strict=True)) for flat in found)
        if not fields:
            return None
        header = _header(fields)
        numbers = [b"%d" % number for number in range(header.num_documents)]
        return view_of(
            header,
            [_decode(sources[number], DocumentSource) for number in numbers],
            [_state(states.get(number), versions.get(number)) for number in numbers],
        )

    async def cancel(self, run_id: str) -> RunView | None:
        if await self.finish(run_id, Status.CANCELLED):
            await self.wake(run_id)
        return await self.get(run_id)

    async def unfed(self) -> dict[str, int]:
        ids = [run_id.decode() for run_id in await self._server.command("ZRANGE", CLOCK, 0, -1)]
        keys = [RunKeys(run_id) for run_id in ids]
        asked = [("HMGET", one.run, "record", "status", "unfed") for one in keys] + [("SCARD", one.fed) for one in keys]
        answers = await self._server.batch(*asked) if asked else []
        found = Counter[str]()
        for (record, status, unfed), num_fed in zip(answers[: len(keys)], answers[len(keys) :], strict=True):
            if record is not None and Status(status.decode()) not in TERMINAL:
                found[_decode(record, NewRun).params.model] += max(int(unfed or 0), int(num_fed > 0))
        return dict(found)

    async def header(self, run_id: str) -> RunHeader | None:
        fields = await self._server.command("HGETALL", RunKeys(run_id).run)
        return _header(fields) if fields else None

    async def open_documents(self, run_id: str, *, limit: int, after: int = -1) -> list[int]:
        found = await self._server.command(
            "ZRANGE", RunKeys(run_id).open, f"({after}", "+inf", "BYSCORE", "LIMIT", 0, limit
        )
        return [int(number) for number in found]

    async def documents(self, run_id: str, numbers: Sequence[int]) -> list[Document]:
        if not numbers:
            return []
        keys = RunKeys(run_id)
        names = [keys.sources, keys.states, keys.versions]
        sources, states, versions = await self._scripts.call(scripts.READ_FIELDS, names, list(numbers))
        return [
            Document(number, _decode(source, DocumentSource), _state(state, version))
            for number, source, state, version in zip(numbers, sources, states, versions, strict=True)
            if source is not None
        ]

    async def texts(self, run_id: str, number: int, items: Sequence[str]) -> dict[str, str]:
        if not items:
            return {}
        members = [_member(number, item) for item in items]
        found = await self._server.command("HMGET", RunKeys(run_id).texts, *members)
        return {item: text.decode() for item, text in zip(items, found, strict=True) if text is not None}

    async def update(self, run_id: str, update: DocumentUpdate, *, window: int) -> Written:
        keys = RunKeys(run_id)
        names = [keys.run, keys.states, keys.versions, keys.texts, keys.open, keys.fed, keys.unfed]
        texts = [part for pair in update.texts.items() for part in pair]
        arguments: list[Argument] = [
            update.number, update.state.version, pack(update.state), int(update.state.is_finished), window,
            update.state.num_unfed, len(update.fed), *update.fed, len(update.settled), *update.settled,
            len(texts), *texts,
        ]  # fmt: skip
        answer = await self._scripts.call(scripts.UPDATE, names, arguments)
        return Written(answer.decode())

    async def in_flight(self, run_id: str) -> list[tuple[int, str]]:
        members = await self._server.command("SMEMBERS", RunKeys(run_id).fed)
        pairs = (member.decode().split(":", 1) for member in members)
        return sorted((int(number), item) for number, item in pairs)

    async def drop_in_flight(self, run_id: str, items: Sequence[tuple[int, str]]) -> None:
        if items:
            await self._server.command("SREM", RunKeys(run_id).fed, *(_member(*item) for item in items))

    async def finish(self, run_id: str, status: Status, *, error: JobError | None = None,
                     output: str | None = None) -> bool:  # fmt: skip
        packed = pack(error) if error else b""
        arguments: list[Argument] = [status, packed, output or "", KEEP_SECONDS]
        return bool(await self._scripts.call(scripts.FINISH, RunKeys(run_id).all, arguments))

    async def now_ms(self) -> int:
        seconds, microseconds = await self._server.command("TIME", near=CLOCK)
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def wake(self, run_id: str, *, delay_seconds: float = 0.0) -> None:
        await self._scripts.call(scripts.WAKE, [CLOCK], [run_id, round(delay_seconds * 1000)])

    async def take_due(self, *, limit: int, hide_seconds: float) -> list[str]:
        ids = await self._scripts.call(scripts.TAKE_DUE, [CLOCK], [limit, round(hide_seconds * 1000)])
        return [run_id.decode() for run_id in ids]

    async def delay(self, run_id: str, *, delay_seconds: float) -> None:
        await self._scripts.call(scripts.DELAY, [CLOCK], [run_id, round(delay_seconds * 1000)])

    async def rest(self, run_id: str) -> bool:
        header = await self.header(run_id)
        if header is not None and not header.is_finished:
            return False
        return bool(await self._server.command("ZREM", CLOCK, run_id))

    async def close(self) -> None:
        await self._server.close()


Record = TypeVar("Record")


def _decode(data: bytes, record: type[Record]) -> Record:
    return msgspec.msgpack.decode(data, type=record)


def _state(data: bytes | None, version: bytes | None) -> DocumentState:
    """A document that nobody has touched yet has no state in the store."""
    if data is None:
        return DocumentState()
    return msgspec.structs.replace(_decode(data, DocumentState), version=int(version or 0))


def _member(number: int, item: str) -> str:
    return f"{number}:{item}"


def _header(fields: dict[bytes, bytes]) -> RunHeader:
    def integer(name: bytes) -> int | None:
        return int(fields[name]) if name in fields else None

    return RunHeader(
        run=_decode(fields[b"record"], NewRun),
        status=Status(fields[b"status"].decode()),
        num_documents=int(fields[b"num_documents"]),
        created_ms=int(fields[b"created_ms"]),
        started_ms=integer(b"started_ms"),
        finished_ms=integer(b"finished_ms"),
        error=_decode(fields[b"error"], JobError) if b"error" in fields else None,
        output=fields[b"output"].decode() if b"output" in fields else None,
        sequence_number=integer(b"sequence_number") or 0,
    )
