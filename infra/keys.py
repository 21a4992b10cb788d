"""Names of keys. All keys of a lane share one Redis hash tag, so that a script may touch them together in a cluster.

A job id carries its lane: `job-<lane>-<random>`; whoever has the id has the slot.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from functools import cache

from infra.contracts import Tier
from infra.errors import UnknownJob

_JOB_ID = re.compile(r"job-(\d{1,9})-[0-9a-z]{8,64}")

# Keys outside lanes: each in a slot of its own.
CARDS = "ms:cards"  # hash: alias -> ModelCard
PING = "ms:ping"  # written to see that the server takes writes
LANES = "ms:lanes"  # hash: lane number -> alias, of all lanes that are served; its field "next" counts
CLOSED_LANES = "ms:{ms:lanes}:closed"  # hash, in the same slot: closed lane -> moment of it; its field "clock" counts


def new_job_id(lane: int, unique: str | None = None) -> str:
    """A new id in `lane`. With `unique` (8-64 lower-case letters and digits), the same id each time."""
    return f"job-{lane}-{unique or secrets.token_hex(12)}"


def lane_of(job_id: str) -> int:
    """The lane that `job_id` lives in. Raises UnknownJob for anything that is no job id."""
    match = _JOB_ID.fullmatch(job_id)
    if match is None:
        raise UnknownJob(f"{job_id[:80]!r} is not a job id", param="id")
    return int(match[1])


def idempotency(tenant: str, route: str, digest: str) -> str:
    return f"ms:idem:{{{tenant}:{route}:{digest}}}"


def tenant_jobs(tenant: str) -> str:
    """Sorted set of a tenant's job ids by creation time."""
    return f"ms:tenant:{{{tenant}}}:jobs"


def workers(alias: str) -> str:
    """Hash: owner -> when its worker told of itself (ms), until when that holds (ms), and the WorkerRecord."""
    return f"ms:{{workers:{alias}}}"


@dataclass(frozen=True, slots=True)
class Lane:
    """Keys of one lane."""

    number: int

    @property
    def prefix(self) -> str:
        return f"ms:{{{self.number}}}"

    def stream(self, tier: Tier) -> str:
        """Stream of the ids of non-terminal jobs of a tier; XLEN counts them."""
        return f"{self.prefix}:stream:{tier}"

    def waiting(self, tier: Tier) -> str:
        """Sorted set: the tier's waiting job ids in the order of claiming; a job's rank is its position."""
        return f"{self.prefix}:waiting:{tier}"

    @property
    def due(self) -> str:
        """Sorted set, the lane's one clock: job id -> lease end, retry time or hand-over time (ms)."""
        return f"{self.prefix}:due"

    @property
    def expiry(self) -> str:
        """Sorted set: job id -> the time (ms) by which it must have started or finished."""
        return f"{self.prefix}:expiry"

    @property
    def feed(self) -> str:
        """Capped stream of ids of jobs whose event logs grew: wakes the gateways' hubs."""
        return f"{self.prefix}:feed"

    @property
    def control(self) -> str:
        """Capped stream of ids of running jobs that were cancelled or expired: wakes the workers."""
        return f"{self.prefix}:control"

    @property
    def outbox(self) -> str:
        """Sorted set: notice id -> the time (ms) at which it may be claimed."""
        return f"{self.prefix}:outbox"

    def notice(self, notice_id: str) -> str:
        return f"{self.prefix}:notice:{notice_id}"

    @property
    def state(self) -> str:
        """Hash: `paused`, `arrivals`, the tiers' service counters and waiting work, sizes of finished jobs."""
        return f"{self.prefix}:state"

    @property
    def dead(self) -> str:
        """Sorted set, the dead-letter list: job id -> the time (ms) it failed with `worker_lost`."""
        return f"{self.prefix}:dead"

    @property
    def watch(self) -> str:
        """Sorted set: id of a job that somebody waits for -> the time (ms) by which it must be watched again."""
        return f"{self.prefix}:watch"

    @property
    def mark(self) -> str:
        """Written behind what must be proven to be kept; see `infra.durability`."""
        return f"{self.prefix}:mark"

    @property
    def never(self) -> str:
        """A key that never exists. A Cluster's server that gives this slot away, key by key, therefore never has all
        that a script declares, and refuses it (TRYAGAIN) before it begins: no script sees half a lane."""
        return f"{self.prefix}:never"

    @property
    def declared(self) -> tuple[str, ...]:
        """What every script on this lane declares, in the order in which `lua/lane.lua` names it."""
        return _declared(self.number)

    def job(self, job_id: str) -> str:
        return f"{self.prefix}:job:{job_id}"

    def events(self, job_id: str) -> str:
        return f"{self.prefix}:events:{job_id}"


@cache
def _declared(number: int) -> tuple[str, ...]:
    lane, tiers = Lane(number), tuple(Tier)
    streams, waiting = tuple(map(lane.stream, tiers)), tuple(map(lane.waiting, tiers))
    clocks = (lane.due, lane.expiry, lane.feed, lane.control, lane.outbox, lane.state, lane.dead, lane.watch)
    return (*streams, *waiting, *clocks, lane.never)
