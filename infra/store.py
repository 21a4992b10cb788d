"""What a job store promises.

`infra.jobs` keeps it in Redis or Valkey, `infra.memory` in this process; one test suite holds both to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from infra.contracts import Claim, Event, Hold, Job, ModelCard, NewJob, Notice, Outcome, Publication, WorkerRecord
from infra.errors import Conflict, UnknownLane
from infra.work import Sizes, Work


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """What lies in a lane right now."""

    waiting: dict[str, int]  # tier -> jobs not running: queued, delayed
    running: int
    paused: bool = False
    delayed: int = 0  # of the waiting ones: those whose time to be tried again has not come
    work: dict[str, Work] = field(default_factory=dict)  # tier -> what its waiting jobs have before them
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def num_waiting(self) -> int:
        return sum(self.waiting.values())


@dataclass(frozen=True, slots=True)
class LaneState:
    """A lane that is served."""

    number: int
    alias: str
    is_open: bool  # new jobs go to it


class Place(Struct, frozen=True):
    """Where a queued job stands."""

    position: int  # waiting jobs ahead in its tier
    ahead: Work  # of those; the first of them counted, the many behind taken as their tier's average
    running: int  # jobs that run in the lane at this moment


def check_lane_change(lane: int, *, is_known: bool, is_last: bool) -> None:
    """Raises UnknownLane or Conflict for a lane that cannot be opened or closed, with the remedy."""
    if not is_known:
        raise UnknownLane(f"lane: there is no lane {lane}; see `millstream lanes`", param="lane")
    if is_last:
        raise Conflict(f"lane {lane} is the last open one of its model; add another before you close it", param="lane")


PLACE_LOOKS = 64  # waiting jobs ahead whose work is counted one by one


@dataclass(frozen=True, slots=True)
class Sweep:
    """Jobs that a sweep brought to their end."""

    expired: list[str] = field(default_factory=list)  # not started, or not finished, in time
    failed: list[str] = field(default_factory=list)  # an attempt over its time, or the last allowed lease lost
    cancelled: list[str] = field(default_factory=list)  # nobody waits for them any more: their watch has lapsed


class JobStore(Protocol):
    """Every method may raise StoreUnavailable; then nothing is known to be written, and calling again is safe."""

    async def open_lane(self, alias: str) -> int:
        """The lowest open lane of an alias, made on first use."""
        ...

    async def lanes(self, alias: str | None = None) -> list[int]:
        """Lanes of an alias, or all of them, closed ones included: whoever serves, serves these. Ascending."""
        ...

    async def lane_states(self) -> list[LaneState]:
        """All lanes that are served; ascending."""
        ...

    async def add_lane(self, alias: str) -> int:
        """One more lane of an alias, open; numbers are never used again."""
        ...

    async def set_open(self, lane: int, is_open: bool) -> None:
        """Opens a lane to new jobs, or closes it: then it is served until it is empty, and dropped.

        Advice to whoever picks lanes for new jobs; a job whose id names a closed lane is admitted to it all the same.
        Raises UnknownLane, and Conflict for the last open lane of an alias.
        """
        ...

    async def drop_drained(self) -> list[int]:
        """Drops the closed lanes that hold no job, notice or dead letter any more; any number of processes may do it.

        A job that comes to such a lane later, by an id drawn before, brings the lane back, as a closed one.
        """
        ...

    async def put_card(self, card: ModelCard) -> None: ...

    async def cards(self) -> dict[str, ModelCard]: ...

    async def put_worker(self, worker: WorkerRecord, *, keep_seconds: float) -> None:
        """Tells of a live worker; forgotten after the time unless told again."""
        ...

    async def drop_worker(self, alias: str, owner: str) -> None: ...

    async def workers(self, alias: str) -> list[WorkerRecord]:
        """Live workers of an alias, by owner."""
        ...

    async def claim_key(self, tenant: str, route: str, key: str, fingerprint: str, job_id: str) -> str:
        """Claims an idempotency key for 24 h: returns `job_id`, or the id claimed before with the same fingerprint.

        Raises IdempotencyMismatch where the key was claimed with another fingerprint.
        """
        ...

    async def submit(self, job: NewJob, *, max_waiting: int | None = None) -> tuple[Job, Place] | None:
        """Admits a job: record, stream entry, `job.queued` event. Returns it and its place, as `look` would.

        None, nothing changed, where the id was there.

        Raises QueueFull where `max_waiting` jobs wait in the lane already.
        """
        ...

    async def get(self, job_id: str) -> Job | None: ...

    async def list_jobs(self, tenant: str, *, limit: int, after: str | None = None) -> list[Job]:
        """A tenant's jobs, newest first, behind `after`. Raises UnknownJob where `after` is not among them."""
        ...

    async def claim(self, lane: int, owner: str, *, free_tokens: int | None, lease_seconds: float,
                    profile: str = "", alone: bool = True, call: str = "") -> Claim | None:  # fmt: skip
        """Starts the next attempt of the job that should go first: a ripe one of the due clock, else a tier's head.

        Takes only a job whose cost fits `free_tokens` (None: an idle worker takes any). Expires what it meets past its
        time. A lapsed lease raises `lost_count`; the last one that a job may lose (`infra.losses`) fails it with
        `worker_lost`. A suspect, which may be what kills workers, goes only to a worker that runs nothing (`alone`),
        and that worker takes nothing else while it runs. Of the others, one at a time is asked to make room:
        raises SuspectWaits, as long as the suspect waits.
        A job that was passed over for too long because it did not fit is no longer overtaken: the claim returns None.
        `call` names the call: repeated by its owner because the answer was lost, it returns the attempt that it had
        started, its lease as new. Without a name, such an attempt's lease lapses, and the job counts as lost once.
        `profile` goes into the record: that of the worker whose tokens come first, and of any other of the same weights
        that goes on with them (`Job.continued_profiles`).
        """
        ...

    async def renew(self, lane: int, holds: Sequence[Hold], *, lease_seconds: float) -> list[Hold]:
        """Extends leases; returns the holds that are no longer good (newer attempt, cancelled, expired)."""
        ...

    async def publish(self, lane: int, publications: Sequence[Publication]) -> list[Hold]:
        """Appends `job.delta` events and wakes the feed; returns the holds refused: nothing is written for them.

        Raises Conflict, nothing written, for a `first_number` that would leave a gap.
        """
        ...

    async def commit(self, hold: Hold, outcome: Outcome, *, last: Publication | None = None) -> bool:
        """Ends a job in one step: last deltas, status, result, terminal event, notices. False: the hold is not good."""
        ...

    async def release(self, hold: Hold, *, reason: str, delay_seconds: float = 0.0) -> bool:
        """Gives a running job back (`hand_over`, `retry`): claimable after the delay. False: the hold is not good.

        Repeating a release or a commit of the same hold is harmless and returns True.
        """
        ...

    async def cancel(self, job_id: str) -> Job | None:
        """Ends a queued or running job as cancelled at once; a running worker is refused from then on. Idempotent.

        The result holds what was published so far. Returns the record as it stands after, None if unknown.
        """
        ...

    async def delete(self, job_id: str) -> bool:
        """Forgets a finished job. False where there is none; raises Conflict while it is not finished."""
        ...

    async def events(self, job_id: str, *, after: int = -1, limit: int = 1000) -> list[Event]:
        """Events with numbers above `after`. Raises UnknownJob, or EventsGone where the log has expired."""
        ...

    async def read_logs(self, lane: int, after: Mapping[str, int], *, limit: int) -> dict[str, list[Event]]:
        """Of several logs of a lane, read in one go: events above the number given with each id, `limit` of each.

        Leaves out jobs that are unknown and logs that have expired: `events` says which.
        """
        ...

    async def now_ms(self) -> int:
        """The store's own time, which leases and deadlines are measured by; other machines' clocks may be wrong."""
        ...

    async def wait_for_work(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        """Blocks until something may be claimable in the lanes or the time is up; returns ids cancelled meanwhile.

        The first call for a lane notes where it stands and returns at once: claim after it, and nothing is missed.
        A hint only: claim decides. One caller at a time for an instance.
        """
        ...

    async def wait_for_events(self, lanes: Sequence[int], *, timeout: float) -> set[str]:
        """Blocks until event logs in the lanes grow, or the time is up; returns their job ids. A hint only.

        The first call for a lane notes where it stands and returns at once: read the logs after it, and nothing is
        missed. One caller at a time for an instance.
        """
        ...

    async def load(self, lane: int) -> LaneLoad: ...

    async def position(self, job_id: str) -> int | None:
        """Waiting jobs ahead in its tier; None unless queued."""
        ...

    async def look(self, job_id: str) -> tuple[Job, Place | None] | None:
        """A job's record and, while it is queued, where it stands; None where there is no such job."""
        ...

    async def watch(self, lane: int, job_ids: Sequence[str], *, seconds: float | None) -> None:
        """Somebody waits for these jobs: a sweep cancels those not watched again within the time. None: never."""
        ...

    async def set_paused(self, lane: int, paused: bool) -> None:
        """Stops or resumes claiming in a lane; submits go on."""
        ...

    async def dead_letters(self, lane: int) -> list[str]:
        """Ids of jobs that failed with `worker_lost`, newest first."""
        ...

    async def sweep(self, lane: int, *, steady_seconds: float = math.inf) -> Sweep:
        """Expires what is past its time, cancels what nobody watches any more. Any number of processes may do it.

        `steady_seconds`: how long the store has answered the caller without a break. Watches of jobs that may go
        unwatched for longer are not judged: who waits for them may not have come through yet.
        """
        ...

    async def take_notices(self, lane: int, *, limit: int, hide_seconds: float) -> list[Notice]:
        """Claims ripe notices of the outbox and hides them for a while; they return unless deleted."""
        ...

    async def delay_notice(self, notice: Notice, *, delay_seconds: float) -> None: ...

    async def delete_notice(self, notice: Notice) -> None: ...

    async def ping(self) -> None:
        """Raises StoreUnavailable where the server does not answer or refuses writes."""
        ...

    async def close(self) -> None: ...
