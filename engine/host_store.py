"""Host memory for blocks taken off the device: one map from content to host slot. Pure bookkeeping of ids.

           try_pin                 unpin (last pin)
    free ----------> pinned (pins >= 1) ----------> free, or cached where it is worth keeping
     ^                 ^  | unpin(keep)
     |         try_pin |  v
     +-- dropped ---- cached (LRU)     <---- try_cache (evicted from the device)

Pinned content belongs to a swapped sequence and is never dropped; cached content is the prefix cache's second tier
and makes way for anything pinned.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

HostKey = bytes | tuple[int, int, int]
"""What a slot holds: a prefix hash, or (device block, its generation, tokens in it) where the content has none."""


class HostStore:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[HostKey, int] = {}
        self._pins: dict[HostKey, int] = {}
        self._cached: OrderedDict[HostKey, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Slots that can be taken by new content now."""
        return len(self._free) + len(self._cached)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def get(self, key: HostKey) -> int | None:
        """The slot with that content; it may be dropped by the next new content unless it is pinned."""
        return self._slots.get(key)

    def num_new(self, keys: Iterable[HostKey]) -> int:
        """How many slots pinning all of `keys` would take from `num_available`."""
        return sum(1 for key in set(keys) if key not in self._pins)

    def try_pin(self, key: HostKey) -> tuple[int, bool] | None:
        """Pins content: (slot, whether it must still be copied there); None where all slots are pinned."""
        slot = self._slots.get(key)
        if slot is not None:
            self._cached.pop(key, None)
            self._pins[key] = self._pins.get(key, 0) + 1
            return slot, False
        slot = self._take()
        if slot is None:
            return None
        self._slots[key] = slot
        self._pins[key] = 1
        return slot, True

    def try_cache(self, key: HostKey) -> int | None:
        """A slot for unpinned content that must now be copied there; None where it is known or all are pinned."""
        if key in self._slots:
            if key in self._cached:
                self._cached.move_to_end(key)
            return None
        slot = self._take()
        if slot is not None:
            self._slots[key] = slot
            self._cached[key] = None
        return slot

    def unpin(self, key: HostKey, *, keep: bool) -> None:
        """One pin less; without any the content stays cached (`keep`) or is forgotten."""
        pins = self._pins[key] - 1
        if pins:
            self._pins[key] = pins
            return
        del self._pins[key]
        if keep:
            self._cached[key] = None
        else:
            self._free.append(self._slots.pop(key))

    def forget(self, key: HostKey) -> None:
        """Drops cached content, such as a copy that failed; pinned or unknown content stays as it is."""
        if key in self._cached:
            del self._cached[key]
            self._free.append(self._slots.pop(key))

    def check_integrity(self, holders: Iterable[Iterable[HostKey]]) -> None:
        """free + pinned + cached = total, and every holder's key pinned. RuntimeError says what broke."""
        counts = Counter(key for keys in holders for key in keys)
        if counts != Counter(self._pins):
            raise RuntimeError(f"pins {self._pins} differ from the keys held by sequences {dict(counts)}")
        if self._slots.keys() != self._pins.keys() | self._cached.keys() or self._pins.keys() & self._cached.keys():
            raise RuntimeError("host content is neither pinned nor cached, or both")
        slots = [*self._free, *self._slots.values()]
        if sorted(slots) != list(range(self.num_slots)):
            raise RuntimeError(f"{len(self._free)} free + {len(self._slots)} used is not {self.num_slots} host slots")

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._cached:
            key, _ = self._cached.popitem(last=False)
            return self._slots.pop(key)
        return None
