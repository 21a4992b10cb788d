from __future__ import annotations

import pytest

from worker.webhooks.slots import MAX_PATIENCE_SECONDS, Slots, endpoint_of


def test_one_endpoint_has_a_quarter_of_the_slots() -> None:
    slots = Slots(8)
    assert [slots.try_take("a") for _ in range(4)] == [True, True, False, False]
    assert slots.try_take("b")
    slots.give_back("a", answered=True)
    assert slots.try_take("a")


def test_a_dead_endpoint_keeps_one_slot_until_it_answers() -> None:
    slots = Slots(8)
    assert slots.try_take("dead")
    slots.give_back("dead", answered=False)
    assert [slots.try_take("dead"), slots.try_take("dead")] == [True, False]
    slots.give_back("dead", answered=True)
    assert [slots.try_take("dead"), slots.try_take("dead")] == [True, True]


def test_all_slots_are_bounded_and_come_back() -> None:
    slots = Slots(8)
    taken = [name for name in map(str, range(20)) if slots.try_take(name)]
    assert len(taken) == slots.num_under_way == 8
    for name in taken:
        slots.give_back(name, answered=False)
    assert slots.num_under_way == 0


def test_a_crowd_is_spread_out() -> None:
    slots = Slots(4)
    assert slots.try_take("a")
    waits = []
    for _ in range(5000):
        assert not slots.try_take("a")
        waits.append(slots.patience_seconds("a"))
    assert waits[0] == 1.0
    assert waits == sorted(waits)
    assert waits[-1] == MAX_PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("http://h/a", "http://H/b?c", True), ("http://h/a", "https://h/a", False), ("http://h:1/", "http://h:2/", False),
     ("http://[::1", "http://[::1", True)],
)  # fmt: skip
def test_what_shares_a_fate(one: str, other: str, same: bool) -> None:
    assert (endpoint_of(one) == endpoint_of(other)) is same


def test_no_slots_are_refused() -> None:
    with pytest.raises(ValueError):
        Slots(0)
