"""The host store: pinned content is never dropped, cached content makes way, nothing leaks."""

from __future__ import annotations

import pytest

from engine.host_store import HostStore


def test_pinning_takes_a_slot_once_however_often_it_is_pinned() -> None:
    store = HostStore(2)
    slot, is_new = store.try_pin(b"a") or (None, None)
    assert is_new and store.try_pin(b"a") == (slot, False)
    assert store.num_pinned == 1 and store.num_available == 1
    store.unpin(b"a", keep=False)
    assert store.get(b"a") == slot
    store.unpin(b"a", keep=False)
    assert store.get(b"a") is None and store.num_available == 2
    store.check_integrity([])


def test_pinned_content_is_never_dropped() -> None:
    store = HostStore(1)
    assert store.try_pin(b"a") is not None
    assert store.try_pin(b"b") is None and store.try_cache(b"b") is None
    assert store.get(b"a") is not None


def test_cached_content_makes_way_least_recently_used_first() -> None:
    store = HostStore(2)
    for key in (b"a", b"b"):
        assert store.try_cache(key) is not None
    assert store.try_cache(b"a") is None  # known: nothing to copy, but used just now
    assert store.try_pin((0, 1, 5)) is not None
    assert store.get(b"b") is None and store.get(b"a") is not None
    store.check_integrity([[(0, 1, 5)]])


def test_cached_content_can_be_pinned_without_a_copy() -> None:
    store = HostStore(1)
    slot = store.try_cache(b"a")
    assert store.try_pin(b"a") == (slot, False)
    store.unpin(b"a", keep=True)
    assert store.num_cached == 1 and store.get(b"a") == slot


def test_new_slots_are_counted_as_pinning_takes_them() -> None:
    store = HostStore(3)
    store.try_pin(b"a")
    store.try_cache(b"b")
    keys = [b"a", b"b", b"c"]
    assert store.num_new(keys) == 2 <= store.num_available
    assert all(store.try_pin(key) is not None for key in keys)
    assert store.num_available == 0


def test_forgetting_leaves_pinned_content_alone() -> None:
    store = HostStore(2)
    store.try_pin(b"a")
    store.try_cache(b"b")
    for key in (b"a", b"b", b"c"):
        store.forget(key)
    assert store.get(b"a") is not None and store.get(b"b") is None
    store.check_integrity([[b"a"]])


def test_a_store_without_slots_refuses() -> None:
    store = HostStore(0)
    assert store.try_pin(b"a") is None and store.try_cache(b"a") is None and store.num_available == 0


@pytest.mark.parametrize(
    "break_it",
    [
        lambda store: store._pins.__setitem__(b"a", 2),
        lambda store: store._free.append(0),
        lambda store: store._free.pop(),
        lambda store: store._cached.__setitem__(b"a", None),
        lambda store: store._slots.pop(b"a"),
    ],
)
def test_broken_books_are_found(break_it) -> None:
    store = HostStore(3)
    store.try_pin(b"a")
    store.try_cache(b"b")
    store.check_integrity([[b"a"]])
    break_it(store)
    with pytest.raises(RuntimeError):
        store.check_integrity([[b"a"]])
