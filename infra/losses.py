"""Which job may be what kills its workers: told from the leases that it lost. Pure; `claim.lua` says the same.

A worker that dies takes the leases of all its jobs with it, and says nothing of the cause. Two signs tell a job that
kills from one that was near: the killer gets no further, and it kills when it is alone.

    lost with new tokens since the loss before  -> the count begins anew: whatever killed was not at that place
    SUSPECT_STUCK_COUNT in a row without        -> a suspect: it runs in a worker that runs nothing else
    MAX_STUCK_COUNT in a row without            -> it killed a worker that it had to itself: a dead letter
    MAX_LOST_COUNT in all                       -> a dead letter too: a job that kills a worker every few tokens
"""

from __future__ import annotations

from typing import NamedTuple

from infra.contracts import Job

SUSPECT_STUCK_COUNT = 2
MAX_STUCK_COUNT = 3
MAX_LOST_COUNT = 10
MAKE_ROOM_MS = 5000  # a worker that was asked to make room for a suspect is asked again, else another is


class Losses(NamedTuple):
    lost_count: int  # leases lost, in all
    stuck_count: int  # the last of them, in a row, by which the job had got no further
    lost_tokens: int  # tokens published when the last was lost

    @classmethod
    def of(cls, job: Job) -> Losses:
        return cls(job.lost_count, job.stuck_count, job.lost_tokens)

    def another(self, num_tokens: int) -> Losses:
        """After one more lost lease, when `num_tokens` tokens of the job had been published."""
        is_stuck = num_tokens <= self.lost_tokens
        return Losses(self.lost_count + 1, self.stuck_count + 1 if is_stuck else 1, num_tokens)

    @property
    def is_suspect(self) -> bool:
        """Whether the job's next attempt must have its worker to itself."""
        return self.stuck_count >= SUSPECT_STUCK_COUNT or self.lost_count >= MAX_LOST_COUNT - 1

    @property
    def is_last(self) -> bool:
        """Whether there is to be no further attempt."""
        return self.stuck_count >= MAX_STUCK_COUNT or self.lost_count >= MAX_LOST_COUNT


def as_lua() -> str:
    """The constants as Lua locals."""
    return (
        f"local SUSPECT_STUCK_COUNT, MAX_STUCK_COUNT = {SUSPECT_STUCK_COUNT}, {MAX_STUCK_COUNT}\n"
        f"local MAX_LOST_COUNT, MAKE_ROOM_MS = {MAX_LOST_COUNT}, {MAKE_ROOM_MS}\n"
    )
