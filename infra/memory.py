"""The job store in this process's memory: tests, simulations, and a service without a server. `infra.jobs` is its twin.

Thread-safe. State is shared by everyone who was made with `another()`; the clock is handed in.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from infra import keys
from infra.clock import Clock, SystemClock
from infra.contracts import (
    Claim,
    Event,
    Hold,
    Job,
    ModelCard,
    NewJob,
    Notice,
    Outcome,
    Publication,
    Struct,
    WorkerRecord,
)
from infra.endings import result_of
from infra.errors import EventsGone, IdempotencyMismatch, StoreUnavailable, UnknownJob
from infra.memory_lane import MemoryLane
from infra.settings import QueueSettings
from infra.states import change_to
from infra.store import LaneLoad, LaneState, Place, Sweep, check_lane_change

_T = TypeVar("_T")
_Record = TypeVar("_Record", bound=Struct)


@dataclass(slots=True)
class _Memory:
    """What all clients of one memory share."""

    clock: Clock
    settings: QueueSettings
    lock: threading.RLock = field(default_factory=threading.RLock)
    lanes: dict[int, MemoryLane] = field(default_factory=dict)
    aliases: dict[int, str] = field(default_factory=dict)  # of the lanes that are served
    closed: set[int] = field(default_factory=set)  # of those, the ones that new jobs do not go to
    dropped: set[int] = field(default_factory=set)
    last_lane: int = 0
    cards: dict[str, ModelCard] = field(default_factory=dict)
    workers: dict[tuple[str, str], tuple[WorkerRecord, int, int]] = field(default_factory=dict)  # told, forgotten (ms)
    idempotency: dict[str, tuple[str, str, int]] = field(default_factory=dict)  # fingerprint, job id, forgotten at (ms)
    tenants: dict[str, dict[str, int]] = field(default_factory=dict)  # tenant -> job id -> created_ms
    bells: dict[asyncio.Event, asyncio.AbstractEventLoop] = field(default_factory=dict)

    def lane(self, number: int) -> MemoryLane:
        if number not in self.lanes:
            self.lanes[number] = MemoryLane(number, self.settings)
        return self.lanes[number]

    def open_lanes(self, alias: str) -> list[int]:
        return [number for number, name in self.aliases.items() if name == alias and number not in self.closed]

    def add_lane(self, alias: str) -> int:
        self.last_lane += 1
        self.aliases[self.last_lane] = alias
        return self.last_lane

    def revive(self, number: int, alias: str) -> None:
        """Has a dropped lane served again."""
        if number in self.dropped:
            self.dropped.discard(number)
            self.aliases[number] = alias
            self.closed.add(number)

    def ring(self) -> None:
        """Wakes everyone who waits, in whichever thread's event loop."""
        for bell, loop in list(self.bells.items()):
            if loop.is_closed():
                del self.bells[bell]
            else:
                loop.call_soon_threadsafe(bell.set)


class MemoryJobs:
    """JobStore in memory."""

    def __init__(self, *, clock: Clock | None = None, settings: QueueSettings | None = None,
                 _memory: _Memory | None = None) -> None:  # fmt: skip
        self._memory = _memory or _Memory(clock or SystemClock(), settings or QueueSettings())
        self._closed = False
        self._work_seen: dict[int, tuple[int, int]] = {}  # lane -> end of its control list, time (ms) of the last look
        self._feed_seen: dict[int, int] = {}

    def another(self) -> MemoryJobs:
        """A client of its own to the same memory, for another thread or another reader."""
        return MemoryJobs(_memory=self._memory)

    # --- lanes, cards, idempotency keys ---

    async def open_lane(self, alias: str) -> int:
        with self._open() as memory:
            return min(memory.open_lanes(alias), default=0) or memory.add_lane(alias)

    async def lanes(self, alias: str | None = None) -> list[int]:
        with self._open() as memory:
            return sorted(number for number, name in memory.aliases.items() if alias in (None, name))

    async def lane_states(self) -> list[LaneState]:
        with self._open() as memory:
            return [
                LaneState(number, name, number not in memory.closed) for number, name in sorted(memory.aliases.items())
            ]

    async def add_lane(self, alias: str) -> int:
        with self._open() as memory:
            return memory.add_lane(alias)

    async def set_open(self, lane: int, is_open: bool) -> None:
        with self._open() as memory:
            alias = memory.aliases.get(lane)
            still_open = [
                number for number, name in memory.aliases.items() if name == alias and number not in memory.closed
            ]
            check_lane_change(lane, is_known=alias is not None, is_last=not is_open and still_open == [lane])
            (memory.closed.discard if is_open else memory.closed.add)(lane)

    async def drop_drained(self) -> list[int]:
        with self._open() as memory:
            drained = [
                number for number in sorted(memory.closed) if memory.lane(number).try_drop(memory.clock.now_ms())
            ]
            for number in drained:
                memory.dropped.add(number)
                memory.closed.discard(number)
                del memory.aliases[number]
            return drained

    async def put_card(self, card: ModelCard) -> None:
        with self._open() as memory:
            memory.cards[card.alias] = _copied(card)

    async def cards(self) -> dict[str, ModelCard]:
        with self._open() as memory:
            return {alias: _copied(card) for alias, card in sorted(memory.cards.items())}

    async def put_worker(self, worker: WorkerRecord, *, keep_seconds: float) -> None:
        with self._open() as memory:
            now_ms = memory.clock.now_ms()
            memory.workers[worker.alias, worker.owner] = (_copied(worker), now_ms, now_ms + _ms(keep_seconds))

    async def drop_worker(self, alias: str, owner: str) -> None:
        with self._open() as memory:
            memory.workers.pop((alias, owner), None)

    async def workers(self, alias: str) -> list[WorkerRecord]:
        with self._open() as memory:
            now_ms = memory.clock.now_ms()
            memory.workers = {key: told for key, told in memory.workers.items() if told[2] > now_ms}
            return [
                msgspec.structs.replace(_copied(record), age_ms=now_ms - told_ms)
                for (name, _), (record, told_ms, _) in sorted(memory.workers.items(), key=lambda item: item[0])
                if name == alias
            ]

    async def claim_key(self, tenant: str, route: str, key: str, fingerprint: str, job_id: str) -> str:
        with self._open() as memory:
            slot, now_ms = keys.idempotency(tenant, route, key), memory.clock.now_ms()
            known, known_id, until_ms = memory.idempotency.get(slot, (fingerprint, job_id, 0))
            if until_ms <= now_ms:
                until_ms = now_ms + round(memory.settings.idempotency_seconds * 1000)
                memory.idempotency[slot] = (fingerprint, job_id, until_ms)
                return job_id
            if known != fingerprint:
                raise IdempotencyMismatch
            return known_id

    # --- the life of a job ---

    async def submit(self, job: NewJob, *, max_waiting: int | None = None) -> tuple[Job, Place] | None:
        with self._open() as memory:
            now_ms = memory.clock.now_ms()
            added = memory.lane(keys.lane_of(job.id)).submit(_copied(job), max_waiting, now_ms)
            if added is not None:
                memory.revive(keys.lane_of(job.id), job.spec.model)
                memory.tenants.setdefault(job.tenant, {})[job.id] = now_ms
                memory.ring()
            return added

    async def get(self, job_id: str) -> Job | None:
        return self._on_lane(keys.lane_of(job_id), lambda lane, now_ms: _job(lane, job_id, now_ms))

    async def list_jobs(self, tenant: str, *, limit: int, after: str | None = None) -> list[Job]:
        with self._open() as memory:
            created_ms = memory.tenants.get(tenant, {})
            newest_first = sorted(created_ms, key=lambda job_id: (created_ms[job_id], job_id), reverse=True)
            if after is not None and after not in created_ms:
                raise UnknownJob(f"{after} is not among your jobs", param="after")
            rest = newest_first[0 if after is None else newest_first.index(after) + 1 :]
            page: list[Job] = []
            for job_id in rest:
                if len(page) == limit:
                    break
                job = _job(memory.lane(keys.lane_of(job_id)), job_id, memory.clock.now_ms())
                if job is None:
                    del created_ms[job_id]
                else:
                    page.append(job)
            return page

    async def claim(self, lane: int, owner: str, *, free_tokens: int | None, lease_seconds: float,
                    profile: str = "", alone: bool = True, call: str = "") -> Claim | None:  # fmt: skip
        def claim(lane: MemoryLane, now_ms: int) -> Claim | None:
            record = lane.claim(owner, free_tokens, _ms(lease_seconds), profile, alone, call, now_ms)
            if record is None:
                return None
            # Without this claim's own `job.started` and, after a lost lease, with the `job.requeued` before it.
            history = record.log[:-1] if record.job.attempt > 1 else []
            return Claim(job=msgspec.structs.replace(record.job), history=list(history))

        return self._on_lane(lane, claim, ring=True)

    async def renew(self, lane: int, holds: Sequence[Hold], *, lease_seconds: float) -> list[Hold]:
        return self._on_lane(lane, lambda lane, now_ms: lane.renew(holds, _ms(lease_seconds), now_ms))

    async def publish(self, lane: int, publications: Sequence[Publication]) -> list[Hold]:
        copies = [_copied(publication) for publication in publications]
        return self._on_lane(lane, lambda lane, now_ms: lane.publish(copies, now_ms), ring=True)

    async def commit(self, hold: Hold, outcome: Outcome, *, last: Publication | None = None) -> bool:
        change_to(outcome.status)  # refuses an outcome that is no end
        end, final = _copied(outcome), None if last is None else _copied(last)
        lane = keys.lane_of(hold.job_id)
        return self._on_lane(lane, lambda lane, now_ms: lane.commit(hold, end, final, now_ms), ring=True)

    async def release(self, hold: Hold, *, reason: str, delay_seconds: float = 0.0) -> bool:
        lane = keys.lane_of(hold.job_id)
        return self._on_lane(
            lane, lambda lane, now_ms: lane.release(hold, reason, _ms(delay_seconds), now_ms), ring=True
        )

    async def cancel(self, job_id: str) -> Job | None:
        def cancel(lane: MemoryLane, now_ms: int) -> Job | None:
            record = lane.find(job_id, now_ms)
            if record is not None:
                lane.cancel(record, result_of(record.log), now_ms)
            return _job(lane, job_id, now_ms)

        return self._on_lane(keys.lane_of(job_id), cancel, ring=True)

    async def delete(self, job_id: str) -> bool:
        with self._open() as memory:
            lane, now_ms = memory.lane(keys.lane_of(job_id)), memory.clock.now_ms()
            job = _job(lane, job_id, now_ms)
            deleted = lane.delete(job_id, now_ms)
            if job is not None:
                memory.tenants.get(job.tenant, {}).pop(job_id, None)
            return deleted

    async def events(self, job_id: str, *, after: int = -1, limit: int = 1000) -> list[Event]:
        def events(lane: MemoryLane, now_ms: int) -> list[Event]:
            record = lane.find(job_id, now_ms)
            if record is None:
                raise UnknownJob(f"no job {job_id}: it never was, or its record has expired", param="id")
            if not record.log and record.job.num_events > after + 1:
                raise EventsGone
            return record.log[after + 1 :][:limit]

        return self._on_lane(keys.lane_of(job_id), events)

    async def read_logs(self, lane: int, after: Mapping[str, int], *, limit: int) -> dict[str, list[Event]]:
        return self._on_lane(lane, lambda lane, now_ms: lane.read_logs(after, limit, now_ms))

    # --- waiting ---

    async def wait_for_work(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        def look() -> tuple[bool, set[str], float | None]:
            """Whether there is something to do, which jobs were ended, and the seconds until the next due time."""
            with self._open() as memory:
                now_ms = memory.clock.now_ms()
                rung, ended, next_ms = False, set[str](), None
                for number in lanes:
                    lane = memory.lane(number)
                    end, looked_ms = self._work_seen.get(number, (None, now_ms))
                    ids = [] if end is None else lane.control.since(end)
                    dues = [due_ms for due_ms in lane.due.values() if due_ms > looked_ms]
                    rung |= end is None or bool(ids) or any(due_ms <= now_ms for due_ms in dues)
                    ended.update(job_id for job_id in ids if job_id)
                    next_ms = min([*dues, *([] if next_ms is None else [next_ms])], default=None)
                    self._work_seen[number] = (lane.control.end, now_ms)
                return rung, ended, None if next_ms is None else max(0, next_ms - now_ms) / 1000

        return await self._wait(look, timeout)

    async def wait_for_events(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        def look() -> tuple[bool, set[str], float | None]:
            with self._open() as memory:
                grown, rung = set[str](), False
                for number in lanes:
                    feed = memory.lane(number).feed
                    rung |= number not in self._feed_seen
                    grown.update(feed.since(self._feed_seen.get(number, feed.end)))
                    self._feed_seen[number] = feed.end
                return rung or bool(grown), grown, None

        return await self._wait(look, timeout)

    async def _wait(self, look: Callable[[], tuple[bool, set[str], float | None]], timeout: float) -> set[str]:
        loop, bell = asyncio.get_running_loop(), asyncio.Event()
        end = loop.time() + timeout
        self._memory.bells[bell] = loop
        try:
            while True:
                bell.clear()
                rung, ids, next_seconds = look()
                left = end - loop.time()
                if rung or left <= 0:
                    return ids
                seconds = left if next_seconds is None else min(left, next_seconds)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):  # `wait_for` may lose a cancellation before Python 3.12
                        await bell.wait()
        finally:
            self._memory.bells.pop(bell, None)

    # --- looking after a lane ---

    async def load(self, lane: int) -> LaneLoad:
        return self._on_lane(lane, lambda lane, now_ms: lane.load(now_ms))

    async def position(self, job_id: str) -> int | None:
        return self._on_lane(keys.lane_of(job_id), lambda lane, now_ms: lane.position(job_id, now_ms))

    async def look(self, job_id: str) -> tuple[Job, Place | None] | None:
        def look(lane: MemoryLane, now_ms: int) -> tuple[Job, Place | None] | None:
            job = _job(lane, job_id, now_ms)
            return None if job is None else (job, lane.place(job_id, now_ms))

        return self._on_lane(keys.lane_of(job_id), look)

    async def watch(self, lane: int, job_ids: Sequence[str], *, seconds: float | None) -> None:
        ms = None if seconds is None else _ms(seconds)
        self._on_lane(lane, lambda lane, now_ms: lane.watch(job_ids, ms, now_ms))

    async def set_paused(self, lane: int, paused: bool) -> None:
        def set_paused(lane: MemoryLane, now_ms: int) -> None:
            lane.paused = paused
            lane.control.append("")

        self._on_lane(lane, set_paused, ring=True)

    async def dead_letters(self, lane: int) -> list[str]:
        return self._on_lane(lane, lambda lane, now_ms: sorted(lane.dead, key=lane.dead.__getitem__, reverse=True))

    async def sweep(self, lane: int, *, steady_seconds: float = math.inf) -> Sweep:
        return self._on_lane(lane, lambda lane, now_ms: lane.sweep(steady_seconds * 1000, now_ms), ring=True)

    async def take_notices(self, lane: int, *, limit: int, hide_seconds: float) -> list[Notice]:
        return self._on_lane(lane, lambda lane, now_ms: lane.take_notices(limit, _ms(hide_seconds), now_ms))

    async def delay_notice(self, notice: Notice, *, delay_seconds: float) -> None:
        self._on_lane(notice.lane, lambda lane, now_ms: lane.delay_notice(notice.id, _ms(delay_seconds), now_ms))

    async def delete_notice(self, notice: Notice) -> None:
        self._on_lane(notice.lane, lambda lane, now_ms: lane.delete_notice(notice.id))

    async def now_ms(self) -> int:
        with self._open() as memory:
            return memory.clock.now_ms()

    async def ping(self) -> None:
        with self._open():
            return

    async def close(self) -> None:
        self._closed = True

    # --- access ---

    @contextmanager
    def _open(self) -> Iterator[_Memory]:
        if self._closed:
            raise StoreUnavailable("this store client is closed")
        with self._memory.lock:
            yield self._memory

    def _on_lane(self, number: int, act: Callable[[MemoryLane, int], _T], *, ring: bool = False) -> _T:
        """Runs one transaction on a lane at the clock's time; `ring` wakes whoever waits."""
        with self._open() as memory:
            answer = act(memory.lane(number), memory.clock.now_ms())
            if ring:
                memory.ring()
            return answer


def _job(lane: MemoryLane, job_id: str, now_ms: int) -> Job | None:
    record = lane.find(job_id, now_ms)
    return None if record is None else msgspec.structs.replace(record.job)


def _copied(record: _Record) -> _Record:
    """A deep copy by way of the wire format, so that only what Redis could hold gets in."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
