"""The job store in Redis or Valkey: each verb one script in one slot. `infra.memory` is its twin.

A call whose reply was lost is repeated once where repeating is harmless; the rest is the caller's (StoreUnavailable).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import redis

from infra import keys
from infra.connect import Server, probe
from infra.contracts import Claim, Event, Hold, Job, ModelCard, NewJob, Notice, Outcome, Publication, WorkerRecord, pack
from infra.contracts import EventBody as Body
from infra.durability import Durability
from infra.endings import result_of
from infra.errors import (
    Conflict,
    EventsGone,
    IdempotencyMismatch,
    QueueFull,
    StoreUnavailable,
    SuspectWaits,
    UnknownJob,
)
from infra.job_hash import (
    arguments_of,
    events_from,
    events_from_script,
    fields_of,
    fields_of_outcome,
    job_from,
    load_from,
    notice_from,
    pairs,
)
from infra.keys import Lane
from infra.node import Argument
from infra.scripts import Call, Scripts
from infra.settings import QueueSettings, StoreSettings
from infra.states import TERMINAL, Status, change_to
from infra.store import LaneLoad, LaneState, Place, Sweep, check_lane_change
from infra.streams import Doorbell, EventsBell, WorkBell
from infra.work import Work

_CARD = msgspec.msgpack.Decoder(ModelCard)
_WORKER = msgspec.msgpack.Decoder(WorkerRecord)
_MAX_MEMORY_SHARE = 0.8  # beyond it no new work: what is accepted needs the rest
_MEMORY_LOOK_SECONDS = 1.0
_LOG_PAGE = 1000
_LANES = (keys.LANES, keys.CLOSED_LANES)
_DROPPED = -2  # what `submit.lua` says of its lane
_SUBMIT_SECONDS = 3600.0  # an entry of a tenant's index that is younger may be of a submit on its way


class RedisJobs:
    """JobStore on one server. Made by `connect`; one instance for an event loop."""

    def __init__(self, url: str, settings: QueueSettings) -> None:
        self._server = Server(url)
        self._settings = settings
        self._scripts = Scripts(self._server, settings)
        self._work = Doorbell(url, WorkBell)
        self._events = Doorbell(url, EventsBell)
        self._durability = Durability()
        self._has_room_until: dict[int, float] = {}  # lane -> monotonic time until which the last look holds

    @classmethod
    async def connect(
        cls, url: str, *, settings: QueueSettings | None = None, kept: StoreSettings | None = None
    ) -> RedisJobs:
        """Opens the store; `kept` says what acceptances and outcomes wait for, None for nothing.

        Raises StoreUnavailable where it is out of reach, StoreUnsuitable where it cannot serve.
        """
        store = cls(url, settings or QueueSettings())
        try:
            await probe(store._server)
            store._durability = await Durability.of(kept or StoreSettings(), store._server)
            await store._scripts.load()
        except BaseException:
            await store.close()
            raise
        return store

    # --- lanes, cards, idempotency keys ---

    async def open_lane(self, alias: str) -> int:
        return int(await self._scripts.call("open_lane", _LANES, [alias]))

    async def lanes(self, alias: str | None = None) -> list[int]:
        names = await self._server.command("HGETALL", keys.LANES)
        return sorted(
            int(number) for number, name in names.items() if number != b"next" and alias in (None, name.decode())
        )

    async def lane_states(self) -> list[LaneState]:
        # No transaction: a server whose memory is full refuses those, even to read.
        asked = (("HGETALL", keys.LANES), ("HGETALL", keys.CLOSED_LANES))
        names, closed = await self._server.batch(*asked)
        numbers = sorted(int(number) for number in names if number != b"next")
        return [LaneState(number, names[b"%d" % number].decode(), b"%d" % number not in closed) for number in numbers]

    async def add_lane(self, alias: str) -> int:
        return int(await self._scripts.call("add_lane", [keys.LANES], [alias]))

    async def set_open(self, lane: int, is_open: bool) -> None:
        name = "reopen_lane" if is_open else "close_lane"
        answer = await self._scripts.call(name, _LANES, [lane])
        check_lane_change(lane, is_known=answer != 0, is_last=answer < 0)

    async def drop_drained(self) -> list[int]:
        closed = await self._server.command("HGETALL", keys.CLOSED_LANES)
        closed.pop(b"clock", None)
        dropped = list[int]()
        for lane, moment in sorted((int(number), moment) for number, moment in closed.items()):
            # A job that comes between the two steps is refused by the first and revives the lane, before or after the
            # second, which therefore changes nothing where the moment is another.
            is_empty = await self._on_lane(lane, "drop", [moment])
            if is_empty and await self._scripts.call("forget_lane", _LANES, [lane, moment]):
                dropped.append(lane)
        return dropped

    async def _revive(self, lane: int, alias: str) -> int:
        """Has a dropped lane served again; returns the moment of it."""
        return int(await self._scripts.call("revive_lane", _LANES, [lane, alias]))

    async def put_card(self, card: ModelCard) -> None:
        await self._server.command("HSET", keys.CARDS, card.alias, pack(card))

    async def cards(self) -> dict[str, ModelCard]:
        packed = await self._server.command("HGETALL", keys.CARDS)
        return {alias.decode(): _CARD.decode(card) for alias, card in sorted(packed.items())}

    async def put_worker(self, worker: WorkerRecord, *, keep_seconds: float) -> None:
        key = keys.workers(worker.alias)
        await self._scripts.call("put_worker", [key], [worker.owner, pack(worker), _ms(keep_seconds)])

    async def drop_worker(self, alias: str, owner: str) -> None:
        await self._server.command("HDEL", keys.workers(alias), owner)

    async def workers(self, alias: str) -> list[WorkerRecord]:
        flat = await self._scripts.call("workers", [keys.workers(alias)], [])
        records = [
            msgspec.structs.replace(_WORKER.decode(packed), age_ms=age_ms)
            for age_ms, packed in zip(flat[::2], flat[1::2], strict=True)
        ]
        return sorted(records, key=lambda record: record.owner)

    async def claim_key(self, tenant: str, route: str, key: str, fingerprint: str, job_id: str) -> str:
        slot = keys.idempotency(tenant, route, hashlib.sha256(key.encode()).hexdigest())
        keep_ms = _ms(self._settings.idempotency_seconds)
        known, known_id = await self._scripts.call("claim_key", [slot], [fingerprint, job_id, keep_ms])
        if known.decode() != fingerprint:
            raise IdempotencyMismatch
        return str(known_id.decode())

    # --- the life of a job ---

    async def submit(self, job: NewJob, *, max_waiting: int | None = None) -> tuple[Job, Place] | None:
        lane = Lane(keys.lane_of(job.id))
        await self._demand_room(lane)
        # The tenant's index is in a slot of its own: noted before, so that no job is ever missing from it.
        # An entry without a job is passed over by readers.
        index = keys.tenant_jobs(job.tenant)
        bound = "" if max_waiting is None else max_waiting
        revived = 0
        while True:
            _, (is_new, *found) = await self._scripts.call_all(
                Call("index_job", [index], [job.id, self._index_ms]),
                Call("submit", lane.declared, [job.id, job.tier, bound, revived, *fields_of(job)]),
                kept=(self._durability, lane.mark),
            )
            if is_new != _DROPPED:
                break
            revived = await self._revive(lane.number, job.spec.model)
        if is_new < 0:
            await self._server.command("ZREM", index, job.id)
            raise QueueFull
        if not is_new:
            return None
        created_ms, *place = found
        return job.queued(lane.number, created_ms), _place_from(place)

    async def get(self, job_id: str) -> Job | None:
        lane = keys.lane_of(job_id)
        ask = ("HGETALL", Lane(lane).job(job_id))
        fields = await self._server.command(*ask)
        if self._durability.needs_proof and Status(fields.get(b"status", b"queued").decode()) in TERMINAL:
            [fields] = await self._durability.batch(self._server, Lane(lane).mark, ask)
        return job_from({name.decode(): value for name, value in fields.items()}, lane) if fields else None

    async def list_jobs(self, tenant: str, *, limit: int, after: str | None = None) -> list[Job]:
        index, start = keys.tenant_jobs(tenant), 0
        if after is not None:
            rank = await self._server.command("ZREVRANK", index, after)
            if rank is None:
                raise UnknownJob(f"{after} is not among your jobs", param="after")
            start = rank + 1
        page, gone = list[Job](), list[str]()
        while len(page) < limit:
            ids = await self._server.command("ZREVRANGE", index, start, start + limit - len(page) - 1)
            if not ids:
                break
            jobs = await asyncio.gather(*(self.get(job_id.decode()) for job_id in ids))
            page += [job for job in jobs if job is not None]
            gone += [job_id.decode() for job_id, job in zip(ids, jobs, strict=True) if job is None]
            start += len(ids)
        if gone:
            await self._scripts.call("prune_index", [index], [_ms(_SUBMIT_SECONDS), *gone])
        return page

    async def claim(self, lane: int, owner: str, *, free_tokens: int | None, lease_seconds: float,
                    profile: str = "", alone: bool = True, call: str = "") -> Claim | None:  # fmt: skip
        free = "" if free_tokens is None else free_tokens
        arguments: list[Argument] = [owner, free, _ms(lease_seconds), profile, int(alone), call]
        while True:
            _, found, *fields = await self._on_lane(lane, "claim", arguments, repeat=call != "")
            if found == 0:
                return None
            if found == 2:
                break
            if found == 3:
                raise SuspectWaits
        job = job_from(pairs(fields), lane)
        history = await self._log(job.id, job.num_events - 1) if job.attempt > 1 else []
        return Claim(job=job, history=history)

    async def renew(self, lane: int, holds: Sequence[Hold], *, lease_seconds: float) -> list[Hold]:
        arguments: list[Argument] = [_ms(lease_seconds)]
        for hold in holds:
            arguments += [hold.job_id, hold.attempt]
        return [holds[index] for index in await self._on_lane(lane, "renew", arguments)]

    async def publish(self, lane: int, publications: Sequence[Publication]) -> list[Hold]:
        arguments: list[Argument] = [len(publications)]
        for publication in publications:
            arguments += [publication.hold.job_id, publication.hold.attempt, *arguments_of(publication)]
        can_repeat = all(publication.first_number is not None for publication in publications)
        refused = await self._on_lane(lane, "publish", arguments, repeat=can_repeat)
        return [publications[index].hold for index in refused]

    async def commit(self, hold: Hold, outcome: Outcome, *, last: Publication | None = None) -> bool:
        body = pack(Body(attempt=hold.attempt, usage=outcome.usage, error=outcome.error))
        fields = fields_of_outcome(outcome)
        arguments: list[Argument] = [
            hold.job_id,
            hold.attempt,
            change_to(outcome.status),
            body,
            len(fields) // 2,
            *fields,
        ]
        arguments += arguments_of(last)
        return bool(await self._on_lane(keys.lane_of(hold.job_id), "commit", arguments))

    async def release(self, hold: Hold, *, reason: str, delay_seconds: float = 0.0) -> bool:
        body = pack(Body(attempt=hold.attempt, reason=reason))
        arguments: list[Argument] = [hold.job_id, hold.attempt, _ms(delay_seconds), body]
        return bool(await self._on_lane(keys.lane_of(hold.job_id), "release", arguments))

    async def cancel(self, job_id: str) -> Job | None:
        await self._cancel(job_id)
        return await self.get(job_id)

    async def _cancel(self, job_id: str, *, only_unwatched: bool = False) -> bool:
        """Whether it was cancelled now, or has ended; False where it is unknown or, `only_unwatched`, is watched."""
        # The result is composed here from the log, and the script takes it only if the log has not grown since.
        # Each refusal means that the job has moved on, so this ends with the job at the latest.
        lane, log = keys.lane_of(job_id), list[Event]()
        while True:
            try:
                log += await self._log(job_id, None, after=len(log) - 1)
            except (UnknownJob, EventsGone):
                return False
            result = result_of(log)
            packed = b"" if result is None else pack(result)
            answer = await self._on_lane(lane, "cancel", [job_id, len(log), packed, int(only_unwatched)])
            if answer >= 0:
                return bool(answer == 1)

    async def delete(self, job_id: str) -> bool:
        job = await self.get(job_id)
        answer = await self._on_lane(keys.lane_of(job_id), "delete", [job_id])
        if isinstance(answer, bytes):
            raise Conflict(f"{job_id} is {answer.decode()}; cancel it before deleting it", param="id")
        if job is not None:
            await self._server.command("ZREM", keys.tenant_jobs(job.tenant), job_id)
        return bool(answer)

    async def events(self, job_id: str, *, after: int = -1, limit: int = 1000) -> list[Event]:
        lane = Lane(keys.lane_of(job_id))
        ask = ("XRANGE", lane.events(job_id), f"{after + 2}-0", "+", "COUNT", limit)
        entries = await self._server.command(*ask)
        if not entries:  # why, and whether still so, is one more question
            entries, is_there, num_events = await self._server.batch(  # a log that grows meanwhile tells its feed
                ask, ("EXISTS", lane.events(job_id)), ("HGET", lane.job(job_id), "num_events")
            )
            if num_events is None:
                raise UnknownJob(f"no job {job_id}: it never was, or its record has expired", param="id")
            if not is_there and int(num_events) > after + 1:
                raise EventsGone
        events = events_from(entries)
        if self._durability.needs_proof and events and events[-1].is_last:
            # What a server may still forget is not told: read again, on the connection that sees it kept.
            [entries] = await self._durability.batch(self._server, lane.mark, ask)
            return events_from(entries)
        return events

    async def read_logs(self, lane: int, after: Mapping[str, int], *, limit: int) -> dict[str, list[Event]]:
        arguments: list[Argument] = [limit]
        for job_id, number in after.items():
            arguments += [job_id, number + 1]
        if not after:
            return {}

        async def read(*, kept: bool) -> dict[str, list[Event]]:
            found = await self._on_lane(lane, "read_logs", arguments, kept=kept)
            logs = zip(after, found, strict=True)
            return {job_id: events_from_script(entries) for job_id, entries in logs if entries != 0}

        logs = await read(kept=False)
        if self._durability.needs_proof and any(events and events[-1].is_last for events in logs.values()):
            return await read(kept=True)  # as in `events`
        return logs

    # --- waiting ---

    async def wait_for_work(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        return await self._work.wait(lanes, timeout=timeout)

    async def wait_for_events(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        return await self._events.wait(lanes, timeout=timeout)

    # --- looking after a lane ---

    async def load(self, lane: int) -> LaneLoad:
        return load_from(await self._on_lane(lane, "load", []))

    async def position(self, job_id: str) -> int | None:
        answer = await self._on_lane(keys.lane_of(job_id), "position", [job_id])
        return None if answer is None else int(answer)

    async def look(self, job_id: str) -> tuple[Job, Place | None] | None:
        lane = keys.lane_of(job_id)
        flat, *place = await self._on_lane(lane, "look", [job_id])
        if self._durability.needs_proof and Status(pairs(flat).get("status", b"queued").decode()) in TERMINAL:
            flat, *place = await self._on_lane(lane, "look", [job_id], kept=True)
        if not flat:
            return None
        job = job_from(pairs(flat), lane)
        if not place:
            return job, None
        return job, _place_from(place)

    async def watch(self, lane: int, job_ids: Sequence[str], *, seconds: float | None) -> None:
        await self._on_lane(lane, "watch", ["" if seconds is None else _ms(seconds), *job_ids])

    async def set_paused(self, lane: int, paused: bool) -> None:
        await self._on_lane(lane, "pause", [int(paused)])

    async def dead_letters(self, lane: int) -> list[str]:
        ids = await self._server.command("ZREVRANGE", Lane(lane).dead, 0, -1)
        return [job_id.decode() for job_id in ids]

    async def sweep(self, lane: int, *, steady_seconds: float = math.inf) -> Sweep:
        sweep, again, steady_ms = Sweep(), 1, "" if math.isinf(steady_seconds) else _ms(steady_seconds)
        while again:
            again, *ended = await self._on_lane(lane, "sweep", [steady_ms])
            for job_id, what in pairs(ended).items():
                if what == b"unwatched":
                    if await self._cancel(job_id, only_unwatched=True):
                        sweep.cancelled.append(job_id)
                else:
                    (sweep.expired if what.decode() == Status.EXPIRED else sweep.failed).append(job_id)
        return sweep

    async def take_notices(self, lane: int, *, limit: int, hide_seconds: float) -> list[Notice]:
        taken = await self._on_lane(lane, "take_notices", [limit, _ms(hide_seconds)], kept=True)
        return [notice_from(notice_id, flat, lane) for notice_id, flat in taken]

    async def delay_notice(self, notice: Notice, *, delay_seconds: float) -> None:
        await self._on_lane(notice.lane, "delay_notice", [notice.id, _ms(delay_seconds)])

    async def delete_notice(self, notice: Notice) -> None:
        await self._on_lane(notice.lane, "delete_notice", [notice.id])

    async def now_ms(self) -> int:
        seconds, microseconds = await self._server.command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def ping(self) -> None:
        await self._server.command("SET", keys.PING, b"", "PX", 1000)

    async def close(self) -> None:
        await self._work.close()
        await self._events.close()
        await self._server.close()

    # --- access ---

    async def _on_lane(
        self, lane: int, script: str, arguments: Sequence[Argument], *, repeat: bool = True, kept: bool = False
    ) -> Any:
        names, proof = Lane(lane), (self._durability, Lane(lane).mark) if kept else None
        try:
            return await self._scripts.call(script, names.declared, arguments, repeat=repeat, kept=proof)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("GAP "):
                raise
            _, job_id, num_events, first = str(error).split()[:4]
            raise Conflict(f"{job_id} has {num_events} events; number {first} would leave a gap") from error

    async def _log(self, job_id: str, end: int | None, *, after: int = -1) -> list[Event]:
        """The events above `after`, below `end` if given, page by page."""
        log: list[Event] = []
        while end is None or after + 1 < end:
            page = await self.events(job_id, after=after, limit=_LOG_PAGE)
            log += page if end is None else [event for event in page if event.sequence_number < end]
            if len(page) < _LOG_PAGE:
                break
            after = page[-1].sequence_number
        return log

    async def _demand_room(self, lane: Lane) -> None:
        """Raises StoreUnavailable where the lane's server has no memory for new work; looks once a second."""
        if time.monotonic() < self._has_room_until.get(lane.number, 0.0):
            return
        memory = await self._server.command("INFO", "memory", near=lane.state)
        if 0 < memory["maxmemory"] * _MAX_MEMORY_SHARE < memory["used_memory"]:
            raise StoreUnavailable(
                f"the store is over {_MAX_MEMORY_SHARE:.0%} of its memory and takes no new jobs until some have ended"
            )
        self._has_room_until[lane.number] = time.monotonic() + _MEMORY_LOOK_SECONDS

    @property
    def _index_ms(self) -> int:
        """Longer than any record of a finished job stays."""
        return _ms(self._settings.record_seconds + self._settings.dead_letter_seconds)


def _place_from(answer: Sequence[int]) -> Place:
    """What `place` of `lua/lane.lua` found of a job that waits."""
    position, prompt_tokens, output_tokens, running = answer
    return Place(position, Work(prompt_tokens, output_tokens), running)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
