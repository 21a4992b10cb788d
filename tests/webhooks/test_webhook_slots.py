from __future__ import annotations

import asyncio

import pytest

from worker.webhooks.slots import MAX_PATIENCE_SECONDS, MAX_WAITING_EACH, Slots, WaitingRoom, endpoint_of


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


async def test_slots_are_handed_on_in_order() -> None:
    room = WaitingRoom(Slots(4))
    assert await room.take("a", timeout_seconds=0)
    order: list[int] = []

    async def wait(number: int) -> None:
        assert await room.take("a", timeout_seconds=30)
        order.append(number)
        room.give_back("a", answered=True)

    waiters = [asyncio.create_task(wait(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert await room.take("b", timeout_seconds=0)  # the crowd of one holds nobody else
    room.give_back("a", answered=True)
    await asyncio.gather(*waiters)
    assert order == [0, 1, 2, 3, 4]


async def test_who_gives_up_waiting_takes_no_slot_along() -> None:
    slots = Slots(4)
    room = WaitingRoom(slots)
    assert await room.take("a", timeout_seconds=0)
    assert not await room.take("a", timeout_seconds=0.01)
    waiter = asyncio.create_task(room.take("a", timeout_seconds=30))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    late = asyncio.create_task(room.take("a", timeout_seconds=30))
    await asyncio.sleep(0)
    room.give_back("a", answered=True)  # handed on to `late`, which is cancelled before it runs
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert slots.num_under_way == 0


async def test_a_full_room_spreads_the_crowd_out() -> None:
    room = WaitingRoom(Slots(4))
    assert await room.take("a", timeout_seconds=0)
    waiters = [asyncio.create_task(room.take("a", timeout_seconds=30)) for _ in range(MAX_WAITING_EACH)]
    await asyncio.sleep(0)
    waits = []
    for _ in range(5000):
        assert not await room.take("a", timeout_seconds=30)
        waits.append(room.patience_seconds("a"))
    assert waits[0] == 1.0
    assert waits == sorted(waits)
    assert waits[-1] == MAX_PATIENCE_SECONDS
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)


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
