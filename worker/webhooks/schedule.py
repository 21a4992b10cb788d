"""When to try again: (answer, tries so far, schedule, a random number) -> decision. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

JITTER = 0.2  # a wait is longer by up to this part of itself, so that many failures do not return at once
MAX_RETRY_AFTER_SECONDS = 24 * 3600.0

GONE = 410
THROTTLED = frozenset({429, *range(500, 600)})


@dataclass(frozen=True, slots=True)
class Answered:
    """The endpoint answered."""

    status: int
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No answer: name not found, refused, reset, timed out. `for_good` where trying again cannot help."""

    reason: str
    for_good: bool = False


Answer = Answered | Unanswered


@dataclass(frozen=True, slots=True)
class Delivered:
    status: int


@dataclass(frozen=True, slots=True)
class TryAgain:
    after_seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


Decision = Delivered | TryAgain | GiveUp


def parse(schedule: str) -> list[float]:
    """Seconds before each try, from "0,5,300". Raises ValueError."""
    try:
        waits = [float(part) for part in schedule.split(",")]
    except ValueError:
        waits = []
    if not waits or not all(0 <= wait < 1e7 for wait in waits):
        raise ValueError(f"webhook_schedule is a list of seconds such as 0,5,300, not {schedule!r}")
    return waits


def decide(answer: Answer, *, num_tries: int, schedule: list[float], random: float) -> Decision:
    """What follows a try. `num_tries` counts this one; `random` is in [0, 1)."""
    match answer:
        case Answered(status, retry_after_seconds):
            if 200 <= status < 300:
                return Delivered(status)
            if status == GONE:
                return GiveUp("the endpoint answered 410 Gone")
            reason = f"the endpoint answered {status}"
            asked = (retry_after_seconds or 0.0) if status in THROTTLED else 0.0
        case Unanswered(reason, for_good):
            if for_good:
                return GiveUp(reason)
            asked = 0.0
        case _:
            assert_never(answer)
    if num_tries >= len(schedule):
        return GiveUp(f"{reason}; {num_tries} tries are enough")
    wait = schedule[num_tries] * (1 + JITTER * random)
    return TryAgain(max(wait, min(asked, MAX_RETRY_AFTER_SECONDS)), reason)
