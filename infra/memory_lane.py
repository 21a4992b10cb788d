"""One lane of the in-memory store: the verbs as plain, synchronous code. `lua/` says the same to Redis.

Every method is one transaction at one moment `now_ms`; the caller holds the lock and brings the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import msgspec

from infra.contracts import (
    ChoiceDelta,
    Event,
    EventBody,
    Hold,
    Job,
    JobError,
    NewJob,
    Notice,
    Outcome,
    Publication,
    Result,
    RunItem,
    Tier,
    Usage,
    Webhook,
    weights_of,
)
from infra.endings import (
    ATTEMPT_TIMEOUT,
    WORKER_LOST,
    expiry_of,
    is_wanted,
    result_of,
)
from infra.errors import Conflict, QueueFull, SuspectWaits
from infra.losses import MAKE_ROOM_MS, Losses
from infra.settings import QueueSettings
from infra.states import TERMINAL, Change, Status, after, change_to
from infra.store import PLACE_LOOKS, LaneLoad, Place, Sweep
from infra.tiers import Head, Service
from infra.work import Sizes, Work, work_left

_REQUEUED_FIRST = -(10**13)  # added to a due time: in front of every arrival number


class Tail:
    """The last ids of an endless list, as a capped stream keeps them."""

    def __init__(self) -> None:
        self.end = 0  # ids ever appended
        self._ids: deque[str] = deque(maxlen=10_000)

    def append(self, job_id: str) -> None:
        self._ids.append(job_id)
        self.end += 1

    def since(self, position: int) -> list[str]:
        """Ids appended after the first `position`, as far as they are still kept."""
        num_new = min(self.end - position, len(self._ids))
        return list(islice(self._ids, len(self._ids) - num_new, None))


@dataclass(slots=True)
class Record:
    """A job and what only the store knows of it."""

    job: Job
    new: NewJob
    log: list[Event] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)  # of what was published
    committed: int | None = None  # the attempt whose commit ended the job
    released: int | None = None  # the attempt that was given back last
    forget_ms: int | None = None  # the record goes
    forget_log_ms: int | None = None


@dataclass(slots=True)
class MemoryLane:
    number: int
    settings: QueueSettings
    records: dict[str, Record] = field(default_factory=dict)
    fresh: dict[Tier, dict[str, None]] = field(default_factory=lambda: {tier: {} for tier in Tier})  # never started
    waiting: dict[Tier, dict[str, int]] = field(default_factory=lambda: {tier: {} for tier in Tier})  # id -> order
    work: dict[Tier, Work] = field(default_factory=lambda: {tier: Work() for tier in Tier})  # of the waiting
    sizes: Sizes = field(default_factory=Sizes)
    due: dict[str, int] = field(default_factory=dict)
    expiry: dict[str, int] = field(default_factory=dict)
    dead: dict[str, int] = field(default_factory=dict)
    watched: dict[str, int] = field(default_factory=dict)
    outbox: dict[str, int] = field(default_factory=dict)
    notices: dict[str, Notice] = field(default_factory=dict)
    service: Service = field(default_factory=Service)
    room_owner: str = ""  # the worker that was asked to make room for a suspect
    room_until_ms: int = 0  # and how long nobody else is
    calls: dict[str, tuple[str, Hold]] = field(default_factory=dict)  # owner -> its last named claim, what that started
    paused: bool = False
    arrivals: int = 0
    feed: Tail = field(default_factory=Tail)  # ids of jobs whose logs grew
    control: Tail = field(default_factory=Tail)  # ids of running jobs that were ended; "" is only a doorbell

    # --- reading ---

    def find(self, job_id: str, now_ms: int) -> Record | None:
        record = self.records.get(job_id)
        if record is not None and record.forget_ms is not None and record.forget_ms <= now_ms:
            del self.records[job_id]
            return None
        if record is not None and record.forget_log_ms is not None and record.forget_log_ms <= now_ms:
            record.log.clear()
        return record

    def position(self, job_id: str, now_ms: int) -> int | None:
        record = self.find(job_id, now_ms)
        if record is None or record.job.status is not Status.QUEUED:
            return None
        waiting = self.waiting[record.job.tier]
        own = (waiting[job_id], job_id)
        return sum((order, other) < own for other, order in waiting.items())

    def place(self, job_id: str, now_ms: int) -> Place | None:
        position = self.position(job_id, now_ms)
        if position is None:
            return None
        tier = self.records[job_id].job.tier
        first = sorted(self.waiting[tier], key=lambda other: (self.waiting[tier][other], other))
        looked = [work_of(self.records[other]) for other in first[: min(position, PLACE_LOOKS)]]
        prompt, output = (
            int(sum(getattr(work, name) for work in looked)) for name in ("prompt_tokens", "output_tokens")
        )
        if position > len(looked):
            num_rest, num_taken = len(first) - len(looked), position - len(looked)
            prompt += (int(self.work[tier].prompt_tokens) - prompt) * num_taken // num_rest
            output += (int(self.work[tier].output_tokens) - output) * num_taken // num_rest
        return Place(position, Work(prompt, output), self._num_running)

    def load(self, now_ms: int) -> LaneLoad:
        return LaneLoad(
            waiting={str(tier): len(jobs) for tier, jobs in self.waiting.items()},
            running=self._num_running,
            paused=self.paused,
            delayed=sum(
                now_ms + _REQUEUED_FIRST < order < 0 for jobs in self.waiting.values() for order in jobs.values()
            ),
            work={str(tier): work for tier, work in self.work.items()},
            sizes=replace(self.sizes),
        )

    def read_logs(self, after: Mapping[str, int], limit: int, now_ms: int) -> dict[str, list[Event]]:
        found = {}
        for job_id, number in after.items():
            record = self.find(job_id, now_ms)
            if record is not None and (record.log or record.job.num_events <= number + 1):
                found[job_id] = record.log[number + 1 :][:limit]
        return found

    @property
    def _num_running(self) -> int:
        return sum(record.job.status is Status.RUNNING for record in self.records.values())

    # --- the life of a job ---

    def submit(self, new: NewJob, max_waiting: int | None, now_ms: int) -> tuple[Job, Place] | None:
        if self.find(new.id, now_ms) is not None:
            return None
        if max_waiting is not None and sum(map(len, self.waiting.values())) >= max_waiting:
            raise QueueFull
        job = msgspec.structs.replace(new.queued(self.number, now_ms), num_events=0)
        record = self.records[new.id] = Record(job, new)
        self.arrivals += 1
        self._wait(record, self.arrivals)
        self.fresh[job.tier][job.id] = None
        self._set_expiry(record, None)
        if new.watch_ms is not None:
            self.watched[job.id] = now_ms + new.watch_ms
        self._append(record, "job.queued", EventBody(), now_ms)
        self.control.append("")
        place = self.place(job.id, now_ms)
        return None if place is None else (msgspec.structs.replace(job), place)

    def claim(self, owner: str, free_tokens: int | None, lease_ms: int, profile: str, alone: bool, call: str,
              now_ms: int) -> Record | None:  # fmt: skip
        name, hold = self.calls.get(owner, (None, None))
        if hold is not None and name == call and (started := self._held(hold, now_ms)) is not None:
            self.due[hold.job_id] = now_ms + lease_ms
            return started
        record = self._claim(owner, free_tokens, lease_ms, profile, alone, now_ms)
        if record is not None and call:
            self.calls[owner] = call, Hold(job_id=record.job.id, attempt=record.job.attempt)
        return record

    def _claim(self, owner: str, free_tokens: int | None, lease_ms: int, profile: str, alone: bool,
               now_ms: int) -> Record | None:  # fmt: skip
        if self.paused:
            return None

        def fits(record: Record) -> bool:
            return free_tokens is None or record.job.cost_tokens <= free_tokens

        for record in self._ripe(now_ms):
            if self._losses(record).is_suspect and not alone:
                if self._makes_room(owner, now_ms):
                    raise SuspectWaits
                continue
            if fits(record):
                self._start(record, owner, lease_ms, profile, now_ms)
                return record
            if now_ms - self.due[record.job.id] >= self._patience_ms:
                return None
        heads = {tier: head for tier in Tier if (head := self._head(tier, now_ms)) is not None}
        tier = self.service.choose(
            {tier: Head(record.job.created_ms, fits(record)) for tier, record in heads.items()},
            now_ms=now_ms,
            patience_ms=self._patience_ms,
        )
        if tier is None:
            return None
        self.service.serve(tier, now_ms)
        del self.fresh[tier][heads[tier].job.id]
        self._start(heads[tier], owner, lease_ms, profile, now_ms)
        return heads[tier]

    def renew(self, holds: Sequence[Hold], lease_ms: int, now_ms: int) -> list[Hold]:
        refused = []
        for hold in holds:
            if self._held(hold, now_ms) is None:
                refused.append(hold)
            else:
                self.due[hold.job_id] = now_ms + lease_ms
        return refused

    def publish(self, publications: Sequence[Publication], now_ms: int) -> list[Hold]:
        held = [(publication, self._held(publication.hold, now_ms)) for publication in publications]
        for publication, record in held:
            if record is not None:
                unwritten(publication, record.job.num_events)  # a gap is refused before anything is written
        for publication, record in held:
            if record is not None:
                self._append_deltas(record, unwritten(publication, record.job.num_events), now_ms)
        return [publication.hold for publication, record in held if record is None]

    def commit(self, hold: Hold, outcome: Outcome, last: Publication | None, now_ms: int) -> bool:
        record = self._held(hold, now_ms)
        if record is None:
            known = self.find(hold.job_id, now_ms)
            return known is not None and known.committed == hold.attempt
        if last is not None:
            self._append_deltas(record, unwritten(last, record.job.num_events), now_ms)
        record.committed = hold.attempt
        self._end(record, change_to(outcome.status), outcome, now_ms)
        return True

    def release(self, hold: Hold, reason: str, delay_ms: int, now_ms: int) -> bool:
        record = self._held(hold, now_ms)
        if record is None:
            known = self.find(hold.job_id, now_ms)
            return known is not None and known.released == known.job.attempt == hold.attempt
        self._change(record, Change.REQUEUE)
        record.job.owner, record.released = None, hold.attempt
        self.due[hold.job_id] = now_ms + delay_ms
        self._wait(record, now_ms + delay_ms + _REQUEUED_FIRST)
        self._set_expiry(record, None)
        self._append(record, "job.requeued", EventBody(attempt=hold.attempt, reason=reason), now_ms)
        self.control.append("")
        return True

    def cancel(self, record: Record, result: Result | None, now_ms: int) -> None:
        if record.job.status in TERMINAL:
            return
        outcome = Outcome(status=Status.CANCELLED, result=result, usage=record.usage)
        self._end(record, Change.CANCEL, outcome, now_ms)

    def watch(self, job_ids: Sequence[str], ms: int | None, now_ms: int) -> None:
        for job_id in job_ids:
            record = self.find(job_id, now_ms)
            if ms is None:
                self.watched.pop(job_id, None)
            elif record is not None and record.job.status not in TERMINAL:
                self.watched[job_id] = now_ms + ms

    def delete(self, job_id: str, now_ms: int) -> bool:
        record = self.find(job_id, now_ms)
        if record is None:
            return False
        if record.job.status not in TERMINAL:
            raise Conflict(f"{job_id} is {record.job.status}; cancel it before deleting it", param="id")
        del self.records[job_id]
        self.dead.pop(job_id, None)
        return True

    def try_drop(self, now_ms: int) -> bool:
        """Whether nothing is left that would need this lane. Records and logs of finished jobs may stay."""
        self._forget_dead(now_ms)
        lives = any(record.job.status not in TERMINAL for record in self.records.values())
        if lives or self.outbox or self.dead:
            return False
        self.service, self.sizes, self.paused, self.arrivals = Service(), Sizes(), False, 0
        return True

    def sweep(self, steady_ms: float, now_ms: int) -> Sweep:
        sweep = Sweep()
        for job_id in sorted(self.expiry, key=lambda job_id: (self.expiry[job_id], job_id)):
            if self.expiry[job_id] <= now_ms:
                status = self._run_out(self.records[job_id], now_ms)
                (sweep.expired if status is Status.EXPIRED else sweep.failed).append(job_id)
        for record in list(self.records.values()):
            if self._is_last_lease_lost(record, now_ms):
                self._bury(record, now_ms)
                sweep.failed.append(record.job.id)
        for job_id in sorted(self.watched, key=lambda job_id: (self.watched[job_id], job_id)):
            record = self.records[job_id]
            if self.watched[job_id] <= now_ms and (record.new.watch_ms or 0) <= steady_ms:
                self.cancel(record, result_of(record.log), now_ms)
                sweep.cancelled.append(job_id)
        for job_id in list(self.records):
            self.find(job_id, now_ms)
        return sweep

    # --- the outbox ---

    def take_notices(self, limit: int, hide_ms: int, now_ms: int) -> list[Notice]:
        ripe = sorted((ripe_ms, notice_id) for notice_id, ripe_ms in self.outbox.items() if ripe_ms <= now_ms)[:limit]
        for _, notice_id in ripe:
            self.outbox[notice_id] = now_ms + hide_ms
            self.notices[notice_id].tries += 1
        return [msgspec.structs.replace(self.notices[notice_id]) for _, notice_id in ripe]

    def delay_notice(self, notice_id: str, delay_ms: int, now_ms: int) -> None:
        if notice_id in self.outbox:
            self.outbox[notice_id] = now_ms + delay_ms

    def delete_notice(self, notice_id: str) -> None:
        self.outbox.pop(notice_id, None)
        self.notices.pop(notice_id, None)

    # --- what the verbs are made of ---

    @property
    def _patience_ms(self) -> int:
        return round(self.settings.patience_seconds * 1000)

    def _held(self, hold: Hold, now_ms: int) -> Record | None:
        record = self.find(hold.job_id, now_ms)
        if record is None or record.job.attempt != hold.attempt or record.job.status is not Status.RUNNING:
            return None
        return record

    def _ripe(self, now_ms: int) -> Iterator[Record]:
        """Jobs whose time has come, the longest due first, after the ends that are due among them."""
        for due_ms, job_id in sorted((due_ms, job_id) for job_id, due_ms in self.due.items()):
            record = self.records[job_id]
            if due_ms > now_ms:
                return
            if self.expiry.get(job_id, now_ms + 1) <= now_ms:
                self._run_out(record, now_ms)
            elif self._is_last_lease_lost(record, now_ms):
                self._bury(record, now_ms)
            else:
                yield record

    def _wait(self, record: Record, order: int) -> None:
        self.waiting[record.job.tier][record.job.id] = order
        self.work[record.job.tier] += work_of(record)

    def _wait_no_more(self, record: Record) -> None:
        tier = record.job.tier
        if self.waiting[tier].pop(record.job.id, None) is not None:
            self.work[tier] -= work_of(record)

    def _head(self, tier: Tier, now_ms: int) -> Record | None:
        """The tier's first job that was never started, after ending those before it whose time is over."""
        for job_id in list(self.fresh[tier]):
            record = self.records[job_id]
            if self.expiry.get(job_id, now_ms + 1) > now_ms:
                return record
            self._run_out(record, now_ms)
        return None

    def _is_last_lease_lost(self, record: Record, now_ms: int) -> bool:
        job = record.job
        return job.status is Status.RUNNING and self.due[job.id] <= now_ms and self._losses(record).is_last

    def _losses(self, record: Record) -> Losses:
        """Of a ripe job: with the lease that a running one has just lost."""
        losses = Losses.of(record.job)
        return losses.another(record.usage.completion_tokens) if record.job.status is Status.RUNNING else losses

    def _lose(self, record: Record) -> None:
        job = record.job
        job.lost_count, job.stuck_count, job.lost_tokens = self._losses(record)

    def _makes_room(self, owner: str, now_ms: int) -> bool:
        """Whether this worker is the one to let its jobs end for a suspect's sake."""
        if self.room_owner != owner and self.room_until_ms > now_ms:
            return False
        self.room_owner, self.room_until_ms = owner, now_ms + MAKE_ROOM_MS
        return True

    def _start(self, record: Record, owner: str, lease_ms: int, profile: str, now_ms: int) -> None:
        job = record.job
        if job.status is Status.RUNNING:
            self._lose(record)
            self._append(record, "job.requeued", EventBody(attempt=job.attempt, reason="lease_lost"), now_ms)
        self._change(record, Change.CLAIM)
        job.attempt += 1
        job.owner = owner
        job.started_ms = job.started_ms or now_ms
        self._wait_no_more(record)
        self.due[job.id] = now_ms + lease_ms
        self._set_expiry(record, now_ms)
        body = EventBody(attempt=job.attempt, profile=_note_profile(record, profile))
        event = self._append(record, "job.started", body, now_ms)
        if job.attempt == 1:
            self._notify(record, event)

    def _run_out(self, record: Record, now_ms: int) -> Status:
        """Ends a job that is past one of its limits: its attempt's as failed, all others as expired."""
        job = record.job
        if job.status is Status.RUNNING and (job.deadline_ms is None or now_ms < job.deadline_ms):
            return self._end_early(record, Change.FAIL, ATTEMPT_TIMEOUT, now_ms)
        return self._end_early(record, Change.EXPIRE, None, now_ms)

    def _bury(self, record: Record, now_ms: int) -> None:
        """Fails a job that has lost too many workers, as a dead letter."""
        self._lose(record)
        self._end_early(record, Change.FAIL, WORKER_LOST, now_ms)
        self.dead[record.job.id] = now_ms
        record.forget_ms = now_ms + self._dead_letter_ms
        self._forget_dead(now_ms)

    @property
    def _dead_letter_ms(self) -> int:
        return round(self.settings.dead_letter_seconds * 1000)

    def _forget_dead(self, now_ms: int) -> None:
        self.dead = {job_id: at_ms for job_id, at_ms in self.dead.items() if at_ms > now_ms - self._dead_letter_ms}

    def _end_early(self, record: Record, change: Change, error: JobError | None, now_ms: int) -> Status:
        outcome = Outcome(status=record.job.status, usage=record.usage, error=error)
        return self._end(record, change, outcome, now_ms)

    def _end(self, record: Record, change: Change, outcome: Outcome, now_ms: int) -> Status:
        job = record.job
        if job.status is Status.RUNNING and record.committed is None:
            self.control.append(job.id)
        outcome.status = self._change(record, change)
        job.outcome, job.finished_ms, job.owner = outcome, now_ms, None
        self.fresh[job.tier].pop(job.id, None)
        self._wait_no_more(record)
        self.due.pop(job.id, None)
        self.expiry.pop(job.id, None)
        self.watched.pop(job.id, None)
        if change is Change.SUCCEED:
            self.sizes.note(
                prompt=outcome.usage.prompt_tokens,
                cached=outcome.usage.cached_tokens,
                output=outcome.usage.completion_tokens,
                asked=min(record.new.spec.output_tokens, job.cost_tokens),
                prompt_thought=job.cost_tokens - min(record.new.spec.output_tokens, job.cost_tokens),
            )
        body = EventBody(attempt=job.attempt, usage=outcome.usage, error=outcome.error)
        event = self._append(record, f"job.{outcome.status}", body, now_ms)
        self._notify(record, event)
        record.forget_ms = now_ms + round(self.settings.record_seconds * 1000)
        record.forget_log_ms = now_ms + round(self.settings.event_log_seconds * 1000)
        return outcome.status

    def _change(self, record: Record, change: Change) -> Status:
        status = after(record.job.status, change)
        if status is None:
            raise Conflict(f"{record.job.id} is {record.job.status}: it cannot {change}")
        record.job.status = status
        return status

    def _set_expiry(self, record: Record, attempt_started_ms: int | None) -> None:
        at_ms = expiry_of(
            record.job, queue_ttl_ms=record.new.queue_ttl_ms, attempt_started_ms=attempt_started_ms
        )  # fmt: skip
        self.expiry.pop(record.job.id, None)
        if at_ms is not None:
            self.expiry[record.job.id] = at_ms

    def _append(self, record: Record, kind: str, body: EventBody, now_ms: int) -> Event:
        event = Event(type=kind, sequence_number=record.job.num_events, at_ms=now_ms, body=body)
        record.log.append(event)
        record.job.num_events += 1
        self.feed.append(record.job.id)
        return event

    def _append_deltas(self, record: Record, bodies: Sequence[EventBody], now_ms: int) -> None:
        for body in bodies:
            self._append(record, "job.delta", body, now_ms)
            record.usage = Usage(
                prompt_tokens=record.usage.prompt_tokens if body.num_prompt_tokens is None else body.num_prompt_tokens,
                completion_tokens=record.usage.completion_tokens + num_tokens(body.deltas),
                cached_tokens=record.usage.cached_tokens if body.num_cached_tokens is None else body.num_cached_tokens,
            )

    def _notify(self, record: Record, event: Event) -> None:
        spec = record.job.spec
        if spec.webhook is not None and is_wanted(event.type, spec.webhook.events):
            self._add_notice(record, event, "webhook", webhook=spec.webhook)
        if spec.run_item is not None and event.is_last:
            self._add_notice(record, event, "run", run_item=spec.run_item)

    def _add_notice(self, record: Record, event: Event, topic: Literal["webhook", "run"], *,
                    webhook: Webhook | None = None, run_item: RunItem | None = None) -> None:  # fmt: skip
        notice = Notice(
            id=f"{record.job.id}-{event.sequence_number}-{topic}", job_id=record.job.id, lane=self.number, topic=topic,
            event=event.type, sequence_number=event.sequence_number, created_ms=event.at_ms, tries=0,
            webhook=webhook, run_item=run_item, traceparent=record.job.traceparent,
        )  # fmt: skip
        self.notices[notice.id] = notice
        self.outbox[notice.id] = event.at_ms


def _note_profile(record: Record, profile: str) -> str | None:
    """Writes down whose tokens these are; returns the profile if it is another one that goes on with them."""
    job = record.job
    if profile and (job.profile is None or not record.usage.completion_tokens):
        job.profile = profile
    if not profile or job.profile is None or job.profile == profile or weights_of(job.profile) != weights_of(profile):
        return None
    if profile not in job.continued_profiles:
        job.continued_profiles = [*job.continued_profiles, profile]
    return profile


def work_of(record: Record) -> Work:
    """What a job that is not running has before it."""
    return work_left(record.job.cost_tokens, record.new.spec.output_tokens, record.usage.completion_tokens)


def unwritten(publication: Publication, num_events: int) -> list[EventBody]:
    """The events of a publication that a log of `num_events` does not hold yet. Raises Conflict on a gap."""
    first = num_events if publication.first_number is None else publication.first_number
    if first > num_events:
        raise Conflict(f"{publication.hold.job_id} has {num_events} events; number {first} would leave a gap")
    return publication.events[num_events - first :]


def num_tokens(deltas: Sequence[ChoiceDelta]) -> int:
    return sum(len(delta.token_ids) for delta in deltas)
