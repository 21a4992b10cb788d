"""When a process that died is started again. Pure."""

from __future__ import annotations

FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 30.0
STEADY_SECONDS = 60.0  # who lived so long is forgiven its earlier deaths


def deaths_after(num_deaths: int, lived_seconds: float) -> int:
    """The count of deaths in a row, once one more process has died that lived `lived_seconds`."""
    return 1 if lived_seconds >= STEADY_SECONDS else num_deaths + 1


def delay_seconds(num_deaths: int) -> float:
    """How long to wait before the next start after `num_deaths` (>= 1) deaths in a row: doubling, bounded."""
    return min(FIRST_DELAY_SECONDS * 2.0 ** min(num_deaths - 1, 16), MAX_DELAY_SECONDS)
