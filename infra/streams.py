"""Blocking reads: what wakes a worker and a gateway's hub. Each reader has a connection of its own.

A read blocks for at most `_BLOCK_SECONDS` and the connection's time-out lies above it, so that a server that is gone is
noticed. Positions survive a lost connection and a failover; what is missed meanwhile, the next look finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import redis

from infra.connect import Server, translated
from infra.contracts import Tier
from infra.keys import Lane

_BLOCK_SECONDS = 1.5
_TIMEOUT_SECONDS = 5.0
_PAGE = 1000


class StreamReader:
    """Follows streams from where they stood when it first saw them."""

    def __init__(self, url: str) -> None:
        self.server = Server(url, max_connections=1, timeout_seconds=_TIMEOUT_SECONDS)
        self._positions: dict[str, bytes] = {}

    async def note(self, streams: Sequence[str]) -> bool:
        """Notes where streams not seen before stand. True if there were any."""
        new = [stream for stream in streams if stream not in self._positions]
        if new:
            asked = [("XINFO STREAM", stream) for stream in new]
            answers = await self.server.batch(*asked, atomic=False, raise_errors=False)
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
        if not streams:
            await asyncio.sleep(seconds)
            return {}
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

    async def close(self) -> None:
        await self.server.close()


class WorkDoorbell:
    """Rings when something may be claimable in some lanes, and names the jobs that were ended meanwhile."""

    def __init__(self, url: str) -> None:
        self._reader = StreamReader(url)
        self._looked_ms: dict[int, int] = {}

    async def wait(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        with translated():
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
        firsts_asked = [
            ("ZRANGEBYSCORE", lane.due, self._after(lane.number), "+inf", "WITHSCORES", "LIMIT", 0, 1) for lane in lanes
        ]
        (seconds, micros), *firsts = await self._reader.server.batch(("TIME",), *firsts_asked, atomic=False)
        now_ms = seconds * 1000 + micros // 1000
        self._looked_ms.update((lane.number, now_ms) for lane in lanes)
        dues = [float(first[1]) for first in firsts if first]
        return max(0.0, min(dues) - now_ms) / 1000 if dues else None

    def _after(self, lane: int) -> str:
        looked_ms = self._looked_ms.get(lane)
        return "-inf" if looked_ms is None else f"({looked_ms}"

    async def close(self) -> None:
        await self._reader.close()


class EventsDoorbell:
    """Rings when event logs in some lanes grow, and names their jobs."""

    def __init__(self, url: str) -> None:
        self._reader = StreamReader(url)

    async def wait(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        with translated():
            feeds = [Lane(number).feed for number in lanes]
            is_new = await self._reader.note(feeds)
            found = await self._reader.read(feeds, seconds=0.0 if is_new else timeout)
        return {job_id.decode() for entries in found.values() for ids in entries for job_id in ids.split()}

    async def close(self) -> None:
        await self._reader.close()
