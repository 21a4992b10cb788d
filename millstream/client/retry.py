"""Whether a call that failed is made again, and when. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite

MAX_TRIES = 5
_FIRST_DELAY_SECONDS = 0.25
_MAX_DELAY_SECONDS = 8.0
_MAX_ASKED_SECONDS = 120.0  # a server that asks for longer is answered with its error
_PASSING = frozenset({408, 425, 429, 502, 503, 504})


def delay_before_retry(num_tries: int) -> float | None:
    """Seconds to wait after `num_tries` (>= 1) broken connections in a row; None: give up."""
    if num_tries >= MAX_TRIES:
        return None
    return min(_FIRST_DELAY_SECONDS * 2.0 ** (num_tries - 1), _MAX_DELAY_SECONDS)


def delay_after_status(status: int, headers: Mapping[str, str], num_tries: int, now: datetime) -> float | None:
    """Seconds to wait after an answer with this status and headers (lower-case names); None: it is final."""
    if status not in _PASSING or headers.get("x-should-retry") == "false":
        return None
    own = delay_before_retry(num_tries)
    asked = _asked_seconds(headers.get("retry-after"), now)
    if own is None or asked is None:
        return own
    return asked if asked <= _MAX_ASKED_SECONDS else None


def _asked_seconds(value: str | None, now: datetime) -> float | None:
    """`Retry-After`, which is seconds or a date (RFC 9110, 10.2.3); None where there is none that makes sense."""
    if value is None:
        return None
    try:
        seconds = float(value)
        return max(seconds, 0.0) if isfinite(seconds) else None
    except ValueError:
        pass  # then it is a date
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max((when.replace(tzinfo=when.tzinfo or UTC) - now).total_seconds(), 0.0)
