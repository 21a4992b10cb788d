"""Brings event logs to the clients that watch them.

One task follows the feeds of all lanes that are watched; a feed says which logs grew. All that grew are read in one go,
each from where it was read last, and its events go to every reader of it. A reader's queue is bounded: one that does
not keep up loses its queue, not its events; it reads the log by itself, at its own pace, until it has caught up.

    feed: "jobs 7, 9 grew"  ->  one read  ->  log 7  ->  reader a: queue  ->  client a
                                                     ->  reader b: behind: reads the log itself  ->  client b
                                          ->  log 9  ->  reader c: queue  ->  client c
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from api_gateway.errors import GatewayClosing
from api_gateway.tasks import end
from infra import keys
from infra.contracts import Event
from infra.errors import StoreUnavailable
from infra.store import JobStore

log = logging.getLogger("millstream.gateway")

FEED_WAIT_SECONDS = 1.0  # also how late a lane that is watched for the first time may join
READS_AT_ONCE = 16
LOGS_AT_ONCE = 128  # in one read
CROWD = 32  # logs that grow together: then the feeds are followed less often, and each read brings more
CROWD_PAUSE_SECONDS = 0.05
QUEUE_PAGES = 2  # a reader's queue, in pages
RECHECK_SECONDS = 60.0  # a feed is a hint and is capped: a silent reader looks at its log so often
PATIENCE_SECONDS = 60.0  # a reader bears a store that does not answer for so long
RETRY_SECONDS = 0.25


@dataclass(slots=True, eq=False)
class _Log:
    """One watched event log."""

    job_id: str
    lane: int
    position: int  # events up to this number need no reading for the readers that keep up
    readers: set[Reader] = field(default_factory=set)

    def push(self, events: Iterable[Event]) -> None:
        fresh = [event for event in events if event.sequence_number > self.position]
        if fresh:
            self.position = fresh[-1].sequence_number
            for reader in self.readers:
                reader.push(fresh)

    def skip_to(self, position: int) -> None:
        """A reader got this far by itself: nobody needs it read again, and whoever has less reads for himself."""
        if position > self.position:
            self.position = position
            for reader in self.readers:
                if reader.reach < position:
                    reader.fall_behind()

    def leave_behind(self) -> None:
        """Every reader looks for himself."""
        for reader in self.readers:
            reader.fall_behind()

    @property
    def is_read_by_all(self) -> bool:
        """Whether every reader is about to read the log by himself, so that nobody waits for a push."""
        return all(reader.is_behind for reader in self.readers)


class Reader:
    """One client's way through one event log, from behind `after`: every event once, in order."""

    def __init__(self, hub: EventHub, job_id: str, *, after: int, ends_early: bool) -> None:
        self._hub = hub
        self._log = hub.attach(self, job_id, after)
        self._queue: deque[Event] = deque()
        self._bell = asyncio.Event()
        self.is_behind = True
        self._looked_at = 0.0
        self.position = after
        self.ends_early = ends_early  # at the start of the gateway's shutdown, not at its end

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hub.detach(self, self._log)

    @property
    def reach(self) -> int:
        """The number of the last event that this reader has, or has in its queue."""
        return self._queue[-1].sequence_number if self._queue else self.position

    async def next(self, *, timeout: float) -> list[Event]:
        """The events that follow, at least one, or none when the time is up.

        Raises UnknownJob, EventsGone, StoreUnavailable after some patience, and GatewayClosing when it is time to go.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            if self._hub.is_closing(self):
                raise GatewayClosing
            events = await self._read() if self.is_behind else self._take()
            if events:
                return events
            if self.is_behind:
                continue
            left = until - loop.time()
            if left <= 0:
                self.is_behind = loop.time() - self._looked_at > RECHECK_SECONDS
                return []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):  # asyncio.wait_for may lose a cancellation before Python 3.12
                    await self._bell.wait()

    async def _read(self) -> list[Event]:
        """Reads a page of the log. What is pushed meanwhile is queued, so that nothing falls between the two."""
        self.is_behind = False
        self._queue.clear()
        self._looked_at = asyncio.get_running_loop().time()
        events = await self._hub.read_patiently(self._log.job_id, self.position)
        if events:
            self.position = events[-1].sequence_number
        if len(events) >= self._hub.page:
            self.is_behind = True
        else:
            self._log.skip_to(self.position)
        return events

    def _take(self) -> list[Event]:
        """What is queued behind the position. A gap, which a read that overtook a push leaves, is read from the log."""
        self._bell.clear()
        events = [event for event in self._queue if event.sequence_number > self.position]
        self._queue.clear()
        if events and events[0].sequence_number != self.position + 1:
            self.is_behind = True
            return []
        if events:
            self.position = events[-1].sequence_number
        return events

    def push(self, events: list[Event]) -> None:
        if self.is_behind:
            return
        if len(self._queue) + len(events) > QUEUE_PAGES * self._hub.page:
            self.fall_behind()
            return
        self._queue.extend(events)
        self._bell.set()

    def fall_behind(self) -> None:
        self._queue.clear()
        self.is_behind = True
        self._bell.set()

    def ring(self) -> None:
        self._bell.set()


class EventHub:
    """All readers of this gateway."""

    def __init__(self, store: JobStore, *, page: int) -> None:
        self.page = page
        self._store = store
        self._logs: dict[str, _Log] = {}
        self._lanes_seen: set[int] = set()
        self._is_watched = asyncio.Event()
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._task: asyncio.Task[None] | None = None
        self._closing_streams = False
        self._closing = False

    # --- readers ---

    def follow(self, job_id: str, *, after: int = -1, ends_early: bool = False) -> Reader:
        return Reader(self, job_id, after=after, ends_early=ends_early)

    def attach(self, reader: Reader, job_id: str, after: int) -> _Log:
        watched = self._logs.get(job_id)
        if watched is None:
            watched = self._logs[job_id] = _Log(job_id, keys.lane_of(job_id), position=after)
            self._is_watched.set()
        watched.readers.add(reader)
        return watched

    def detach(self, reader: Reader, watched: _Log) -> None:
        watched.readers.discard(reader)
        if not watched.readers and self._logs.get(watched.job_id) is watched:
            del self._logs[watched.job_id]
            if not self._logs:
                self._is_watched.clear()

    def is_closing(self, reader: Reader) -> bool:
        return self._closing or (self._closing_streams and reader.ends_early)

    @property
    def is_closing_streams(self) -> bool:
        return self._closing_streams

    @property
    def num_readers(self) -> int:
        return sum(len(watched.readers) for watched in self._logs.values())

    async def read_patiently(self, job_id: str, after: int) -> list[Event]:
        """A page of a log; a store that does not answer is asked again for a while."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_SECONDS
        while True:
            try:
                async with self._reads:
                    return await self._store.events(job_id, after=after, limit=self.page)
            except StoreUnavailable:
                if loop.time() > until or self._closing:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    # --- the life of the hub ---

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow_feeds(), name="event hub")

    def close_streams(self) -> None:
        """Ends the readers that end early; the others have until `close`."""
        self._closing_streams = True
        self._ring_all()

    async def close(self) -> None:
        self._closing_streams = self._closing = True
        self._ring_all()
        if self._task is not None:
            await end(self._task)
            self._task = None

    def _ring_all(self) -> None:
        for watched in self._logs.values():
            for reader in watched.readers:
                reader.ring()

    # --- feeds ---

    async def _follow_feeds(self) -> None:
        while True:
            await self._is_watched.wait()
            try:
                await self._follow_once(sorted({watched.lane for watched in self._logs.values()}))
            except StoreUnavailable as error:
                log.warning("event feeds: %s; trying again", error)
            except Exception:
                log.exception("event feeds: going on after an unexpected error")
            else:
                continue
            self._lanes_seen.clear()  # what grew meanwhile is found by looking at every log
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow_once(self, lanes: list[int]) -> None:
        grown = await self._store.wait_for_events(lanes, timeout=FEED_WAIT_SECONDS)
        new_lanes = set(lanes) - self._lanes_seen
        self._lanes_seen.update(new_lanes)
        logs = [self._logs[job_id] for job_id in grown if job_id in self._logs]
        logs += [each for each in self._logs.values() if each.lane in new_lanes and each.job_id not in grown]
        await asyncio.gather(*(self._read_on(lane, some) for lane, some in _batches(logs)))
        if len(logs) >= CROWD:
            await asyncio.sleep(CROWD_PAUSE_SECONDS)

    async def _read_on(self, lane: int, logs: Sequence[_Log]) -> None:
        """Reads what logs of a lane grew by, for all their readers. Readers find out what is wrong when they look."""
        while logs := [each for each in logs if not each.is_read_by_all]:
            asked = {each.job_id: each.position for each in logs}
            try:
                async with self._reads:
                    found = await self._store.read_logs(lane, asked, limit=self.page)
            except StoreUnavailable:
                found = {}
            for each in logs:
                if each.job_id in found:
                    each.push(found[each.job_id])
                else:
                    each.leave_behind()
            logs = [each for each in logs if len(found.get(each.job_id, ())) >= self.page]


def _batches(logs: Iterable[_Log]) -> Iterator[tuple[int, list[_Log]]]:
    """The logs by lane, at most so many at once."""
    by_lane = defaultdict[int, list[_Log]](list)
    for each in logs:
        by_lane[each.lane].append(each)
    for lane, its_logs in by_lane.items():
        for start in range(0, len(its_logs), LOGS_AT_ONCE):
            yield lane, its_logs[start : start + LOGS_AT_ONCE]
