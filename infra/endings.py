"""Ends that the store itself gives to a job, and the pure parts of every end. Lua receives the constants (`as_lua`)."""

from __future__ import annotations

from collections.abc import Iterable

from infra.contracts import Choice, Event, Job, JobError, Result
from infra.losses import MAX_LOST_COUNT, MAX_STUCK_COUNT

WORKER_LOST = JobError(
    code="worker_lost",
    message=f"Workers died or hung while they ran this job, {MAX_STUCK_COUNT} in a row without getting further "
    f"(or {MAX_LOST_COUNT} in all); it may be what breaks them. Look at their logs, then submit it again as a new job.",
)
ATTEMPT_TIMEOUT = JobError(
    code="attempt_timeout",
    message="One attempt ran longer than `attempt_timeout` allows; ask for less output or allow more time.",
)


def is_wanted(event: str, wanted: Iterable[str]) -> bool:
    """Whether a webhook that names the events `wanted` (none: every end) is told of `event`."""
    names = frozenset(wanted)
    return event in names if names else event not in ("job.queued", "job.started", "job.delta", "job.requeued")


def expiry_of(job: Job, *, queue_ttl_ms: int | None, attempt_started_ms: int | None) -> int | None:
    """When the store must end the job if nothing else happens: the next of its limits, None without any."""
    limits = [job.deadline_ms]
    if job.attempt == 0 and queue_ttl_ms is not None:
        limits.append(job.created_ms + queue_ttl_ms)
    if attempt_started_ms is not None and job.attempt_timeout_ms is not None:
        limits.append(attempt_started_ms + job.attempt_timeout_ms)
    return min((limit for limit in limits if limit is not None), default=None)


def result_of(events: Iterable[Event]) -> Result | None:
    """What the deltas of an event log add up to; None where there are none."""
    choices: dict[int, Choice] = {}
    for event in events:
        for delta in event.body.deltas:
            choice = choices.setdefault(
                delta.index, Choice(index=delta.index, text="", token_ids=[], finish_reason=None)
            )
            choice.text += delta.text
            choice.token_ids.extend(delta.token_ids)
            if delta.logprobs is not None:
                choice.logprobs = (choice.logprobs or []) + delta.logprobs
            choice.finish_reason = delta.finish_reason or choice.finish_reason
            choice.stop_reason = choice.stop_reason if delta.stop_reason is None else delta.stop_reason
    return Result(choices=[choices[index] for index in sorted(choices)]) if choices else None


def as_lua() -> str:
    """The constants as Lua locals."""

    def table(error: JobError) -> str:
        return f'{{code="{error.code}", message="{error.message}"}}'

    return f"local WORKER_LOST = {table(WORKER_LOST)}\nlocal ATTEMPT_TIMEOUT = {table(ATTEMPT_TIMEOUT)}\n"
