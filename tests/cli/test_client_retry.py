"""Which answers are worth another call, and when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from millstream.client.retry import MAX_TRIES, delay_after_status, delay_before_retry

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_broken_connections_are_tried_again_later_and_later_then_given_up() -> None:
    delays = [delay_before_retry(number) for number in range(1, MAX_TRIES)]
    assert all(delay is not None for delay in delays)
    assert delays == sorted(delays, key=lambda delay: delay or 0)
    assert delay_before_retry(MAX_TRIES) is None


@pytest.mark.parametrize("status", [200, 202, 400, 401, 404, 409, 410, 413, 422, 500])
def test_final_answers(status: int) -> None:
    assert delay_after_status(status, {}, 1, NOW) is None


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        (format_datetime(NOW + timedelta(seconds=9), usegmt=True), 9.0),
        (format_datetime(NOW - timedelta(seconds=9), usegmt=True), 0.0),
        ("soon", delay_before_retry(1)),
        ("nan", delay_before_retry(1)),
        ("86400", None),
    ],
)
def test_what_the_server_asks_for(status: int, header: str, expected: float | None) -> None:
    assert delay_after_status(status, {"retry-after": header}, 1, NOW) == expected


def test_a_server_that_forbids_retries_is_obeyed() -> None:
    assert delay_after_status(503, {"x-should-retry": "false"}, 1, NOW) is None


def test_tries_end() -> None:
    assert delay_after_status(503, {"retry-after": "1"}, MAX_TRIES, NOW) is None
