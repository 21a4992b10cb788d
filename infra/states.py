"""Job states: the one table. Lua receives it verbatim (`as_lua`), so no other place decides what may follow what."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Change(StrEnum):
    CLAIM = "claim"  # a worker starts an attempt
    REQUEUE = "requeue"  # hand-over, lost lease, or a retryable error
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"


TRANSITIONS: dict[tuple[Status, Change], Status] = {
    (Status.QUEUED, Change.CLAIM): Status.RUNNING,
    (Status.QUEUED, Change.CANCEL): Status.CANCELLED,
    (Status.QUEUED, Change.EXPIRE): Status.EXPIRED,
    (Status.RUNNING, Change.CLAIM): Status.RUNNING,  # a lapsed lease is claimed again: the next attempt
    (Status.RUNNING, Change.REQUEUE): Status.QUEUED,
    (Status.RUNNING, Change.SUCCEED): Status.SUCCEEDED,
    (Status.RUNNING, Change.FAIL): Status.FAILED,
    (Status.RUNNING, Change.CANCEL): Status.CANCELLED,
    (Status.RUNNING, Change.EXPIRE): Status.EXPIRED,
}

TERMINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.EXPIRED})


def after(status: Status, change: Change) -> Status | None:
    """The status that `change` leads to, or None where the table does not allow it."""
    return TRANSITIONS.get((status, change))


_ENDS = {
    Status.SUCCEEDED: Change.SUCCEED,
    Status.FAILED: Change.FAIL,
    Status.CANCELLED: Change.CANCEL,
    Status.EXPIRED: Change.EXPIRE,
}


def change_to(end: Status) -> Change:
    """The change that leads to a terminal status. Raises ValueError for any other."""
    if end not in _ENDS:
        raise ValueError(f"{end} is no end of a job")
    return _ENDS[end]


def as_lua() -> str:
    """The table as a Lua literal: `TRANSITIONS["running:succeed"] == "succeeded"`, `TERMINAL["succeeded"] == true`."""
    rows = ", ".join(f'["{status}:{change}"]="{target}"' for (status, change), target in TRANSITIONS.items())
    ends = ", ".join(f'["{status}"]=true' for status in sorted(TERMINAL))
    return f"local TRANSITIONS = {{{rows}}}\nlocal TERMINAL = {{{ends}}}\n"
