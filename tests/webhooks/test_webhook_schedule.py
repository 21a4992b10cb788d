from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.settings import DispatcherSettings
from worker.webhooks.schedule import (
    JITTER,
    MAX_RETRY_AFTER_SECONDS,
    Answered,
    Delivered,
    GiveUp,
    TryAgain,
    Unanswered,
    decide,
    parse,
)

WAITS = [0.0, 5.0, 300.0]


@given(status=st.integers(200, 299), num_tries=st.integers(1, 9))
def test_any_2xx_is_delivered(status: int, num_tries: int) -> None:
    assert decide(Answered(status), num_tries=num_tries, schedule=WAITS, random=0.5) == Delivered(status)


@given(status=st.integers(100, 599).filter(lambda status: not 200 <= status < 300 and status != 410))
def test_everything_else_is_tried_again_and_then_given_up(status: int) -> None:
    assert decide(Answered(status), num_tries=1, schedule=WAITS, random=0.0) == TryAgain(
        5.0, f"the endpoint answered {status}"
    )
    assert isinstance(decide(Answered(status), num_tries=3, schedule=WAITS, random=0.0), GiveUp)


def test_410_ends_at_once() -> None:
    assert isinstance(decide(Answered(410), num_tries=1, schedule=WAITS, random=0.0), GiveUp)


@pytest.mark.parametrize(
    ("status", "asked", "expected"),
    [(429, 60.0, 60.0), (503, 60.0, 60.0), (503, 1.0, 5.0), (404, 60.0, 5.0), (302, 60.0, 5.0), (503, None, 5.0),
     (503, 1e12, MAX_RETRY_AFTER_SECONDS)],
)  # fmt: skip
def test_retry_after_is_honoured_where_it_means_something(status: int, asked: float | None, expected: float) -> None:
    decision = decide(Answered(status, asked), num_tries=1, schedule=WAITS, random=0.0)
    assert isinstance(decision, TryAgain)
    assert decision.after_seconds == expected


def test_no_answer_is_tried_again_unless_it_never_can_be() -> None:
    assert decide(Unanswered("reset"), num_tries=2, schedule=WAITS, random=0.0) == TryAgain(300.0, "reset")
    assert decide(Unanswered("denied", for_good=True), num_tries=1, schedule=WAITS, random=0.0) == GiveUp("denied")


@given(random=st.floats(0, 1, exclude_max=True), num_tries=st.integers(1, 7))
def test_jitter_only_lengthens(random: float, num_tries: int) -> None:
    waits = parse(DispatcherSettings().webhook_schedule)
    decision = decide(Unanswered("reset"), num_tries=num_tries, schedule=waits, random=random)
    assert isinstance(decision, TryAgain)
    assert waits[num_tries] <= decision.after_seconds <= waits[num_tries] * (1 + JITTER)


def test_the_default_schedule_is_the_documented_one() -> None:
    assert parse(DispatcherSettings().webhook_schedule) == [0, 5, 300, 1800, 7200, 18000, 36000, 36000]


@pytest.mark.parametrize("text", ["", "a", "0,,5", "-1", "nan", "inf", "0;5"])
def test_bad_schedules_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="webhook_schedule"):
        parse(text)
