"""Blocking reads: what wakes a worker and a gateway's hub. They have connections of their own.

A read blocks for at most `_BLOCK_SECONDS` and the connection's time-out lies above it, so that a server that is gone is
noticed. Positions survive a lost connection and a failover; what is missed meanwhile, the next look finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import redis

from infra.connect import Server, Translated
from infra.contracts import Tier
from infra.keys import Lane
from infra.script_caller import ScriptCaller

_BLOCK_SECONDS = 1.5
_TIMEOUT_SECONDS = 5.0
_PAGE = 1000
_MAX_LANES = 1000  # of a Cluster, read side by side
# When the due clocks of lanes strike next. KEYS: the clocks. ARGV: how far each was looked at: '-inf', or '(' and a
# time (ms). Returns now (ms), then of each its first time (ms) behind that, or ''.
_DUE = """#!lua flags=allow-oom
local time = redis.call('TIME')
local found = { time[1] * 1000 + math.floor(time[2] / 1000) }
for i, clock in ipairs(KEYS) do
  found[i + 1] = redis.call('ZRANGEBYSCORE', clock, ARGV[i], '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2] or ''
end
return found
"""
_MISSING_SECONDS = 0.5  # a lane whose server does not answer is asked again after so long


class StreamReader:
    """Follows streams from where they stood when it first saw them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._positions: dict[str, bytes] = {}

    async def note(self, streams: Sequence[str]) -> bool:
        """Notes where streams not seen before stand. True if there were any."""
        new = [stream for stream in streams if stream not in self._positions]
        if new:
            asked = [("XINFO STREAM", stream) for stream in new]
            answers = await self.server.raw_batch(*asked)
            for stream, answer in zip(new, answers, strict=True):
                if isinstance(answer, redis.exceptions.ResponseError) and "no such key" in str(answer):
                    self._positions[stream] = b"0-0"
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    self._positions[stream] = answer["last-generated-id"]
        return bool(new)

    async def read(self, streams: Sequence[str], *, seconds: float) -> dict[str, list[bytes]]:
        """The field `j` of new entries by stream; blocks until there are some, or the time is up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            left = end - loop.time()
            block_ms = max(1, round(min(left, _BLOCK_SECONDS) * 1000))
            positions = [self._positions[stream] for stream in streams]
            try:
                answer = await self.server.raw(
                    "XREAD", "COUNT", _PAGE, "BLOCK", block_ms, "STREAMS", *streams, *positions
                )
            except redis.exceptions.ResponseError as error:
                if not str(error).startswith("UNBLOCKED"):
                    raise
                return {}  # a failover: let the caller look
            if answer or left <= _BLOCK_SECONDS:
                return {stream.decode(): self._advance(stream.decode(), entries) for stream, entries in answer or ()}

    def _advance(self, stream: str, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[bytes]:
        self._positions[stream] = entries[-1][0]
        return [fields[b"j"] for _, fields in entries]


class Bell(Protocol):
    async def ring(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        """Blocks until something happened in the lanes, or the time is up. Raises redis errors as they are."""
        ...


class WorkBell:
    """Rings when something may be claimable in some lanes, and names the jobs that were ended meanwhile."""

    def __init__(self, server: Server) -> None:
        self._reader = StreamReader(server)
        self._scripts = ScriptCaller(server)
        self._looked_ms: dict[int, int] = {}

    async def ring(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        keys = [Lane(number) for number in lanes]
        streams = [lane.stream(tier) for lane in keys for tier in Tier] + [lane.control for lane in keys]
        is_new = await self._reader.note(streams)
        next_seconds = await self._seconds_until_due(keys)
        if is_new or next_seconds == 0:
            seconds = 0.0
        else:
            seconds = timeout if next_seconds is None else min(timeout, next_seconds)
        found = await self._reader.read(streams, seconds=seconds)
        controls = {lane.control for lane in keys}
        return {job_id.decode() for stream in controls for job_id in found.get(stream, ()) if job_id}

    async def _seconds_until_due(self, lanes: Sequence[Lane]) -> float | None:
        """Until the next time that no look has seen pass; 0 if one has passed since the last, None without any."""
        clocks, looked = [lane.due for lane in lanes], [self._after(lane.number) for lane in lanes]
        now_ms, *firsts = await self._scripts.call(_DUE, clocks, looked)
        self._looked_ms.update((lane.number, now_ms) for lane in lanes)
        dues = [float(first) for first in firsts if first]
        return max(0.0, min(dues) - now_ms) / 1000 if dues else None

    def _after(self, lane: int) -> str:
        looked_ms = self._looked_ms.get(lane)
        return "-inf" if looked_ms is None else f"({looked_ms}"


class EventsBell:
    """Rings when event logs in some lanes grow, and names their jobs."""

    def __init__(self, server: Server) -> None:
        self._reader = StreamReader(server)

    async def ring(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        feeds = [Lane(number).feed for number in lanes]
        is_new = await self._reader.note(feeds)
        found = await self._reader.read(feeds, seconds=0.0 if is_new else timeout)
        return {job_id.decode() for entries in found.values() for ids in entries for job_id in ids.split()}


class Doorbell:
    """Waits at several lanes: by one read where one server has them all; by one for each lane in a Cluster, whose
    reads go on from one wait to the next, so that none is broken off."""

    def __init__(self, url: str, bell: Callable[[Server], Bell]) -> None:
        self._server = Server(url, timeout_seconds=_TIMEOUT_SECONDS, max_connections=_MAX_LANES)
        self._bell = bell
        self._bells: dict[int | None, Bell] = {}  # by lane; of a single server, one for all
        self._reading: dict[int, asyncio.Task[set[str]]] = {}

    async def wait(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        """What the bells name. Raises StoreUnavailable where no server of the lanes answers."""
        if not lanes:
            await asyncio.sleep(timeout)
            return set()
        with Translated():
            if not self._server.is_cluster:
                return await self._bell_of(None).ring(lanes, timeout=timeout)
            new = [lane for lane in lanes if lane not in self._bells]
            for lane in lanes:
                if lane not in self._reading:
                    self._reading[lane] = asyncio.create_task(self._read(lane, timeout))
            if new:  # these note where their lanes stand, and return at once
                await asyncio.wait([self._reading[lane] for lane in new])
            else:
                await asyncio.wait(self._reading.values(), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return self._collected(lanes)

    def _collected(self, lanes: Sequence[int]) -> set[str]:
        done = {lane: self._reading.pop(lane) for lane, task in list(self._reading.items()) if task.done()}
        failures = {lane: error for lane, task in done.items() if (error := task.exception()) is not None}
        if failures.keys() >= set(lanes):
            raise next(iter(failures.values()))
        return {job_id for lane, task in done.items() if lane not in failures for job_id in task.result()}

    async def _read(self, lane: int, timeout: float) -> set[str]:
        try:
            return await self._bell_of(lane).ring([lane], timeout=timeout)
        except Exception:
            await asyncio.sleep(_MISSING_SECONDS)
            raise

    def _bell_of(self, lane: int | None) -> Bell:
        if lane not in self._bells:
            self._bells[lane] = self._bell(self._server)
        return self._bells[lane]

    async def close(self) -> None:
        for task in self._reading.values():
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        await self._server.close()
