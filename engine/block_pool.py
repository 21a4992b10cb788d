"""The pool of KV blocks: who holds them, which are cached, which are free. Pure bookkeeping of ids.

         try_allocate                release (last holder)
    free ------------> held (ref_count >= 1) ------------> free     where its content has no hash
     ^                  |  ^
     |          release |  | hold                                   where its content has one
     |                  v  |
     +---- evicted --- cached (ref_count 0, hash known, in LRU order)

Allocation takes free blocks first and evicts the least recently used cached ones after.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """`on_evict(block, hash)` is told of each cached block before it is handed out again."""

    def __init__(self, num_blocks: int, block_size: int, on_evict: Callable[[int, bytes], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._generations = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was freed last is warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def utilization(self) -> float:
        """Share of the pool that is held, 0..1."""
        return self.num_held / self.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def hash_of(self, block: int) -> bytes | None:
        return self._hashes[block]

    def generation(self, block: int) -> int:
        """Counts how often the block was handed out: (block, generation) names its content for good."""
        return self._generations[block]

    def try_allocate(self, count: int) -> list[int] | None:
        """`count` blocks with ref_count 1 and no hash; None, nothing changed, where there are not so many."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._ref_counts[block] = 1
            self._generations[block] += 1
            blocks.append(block)
        return blocks

    def hold(self, block: int) -> None:
        """One more holder of a held or cached block."""
        count = self._ref_counts[block]
        if count == 0:
            if block not in self._cached:
                raise RuntimeError(f"block {block} is free; it cannot be held without being allocated")
            del self._cached[block]
        self._ref_counts[block] = count + 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less of each. Of several that become cached, the last given is evicted first."""
        for block in reversed(list(blocks)):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} is released more often than it was held")
            self._ref_counts[block] = count
            if count == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, content_hash: bytes) -> bool:
        """Makes a held block's content findable. False where this block or another is known by now."""
        if self._ref_counts[block] == 0:
            raise RuntimeError(f"block {block} is not held; only what a sequence computed is registered")
        if self._hashes[block] is not None or content_hash in self._by_hash:
            return False
        self._hashes[block] = content_hash
        self._by_hash[content_hash] = block
        return True

    def lookup(self, content_hash: bytes) -> int | None:
        """The held or cached block of that content. Hold it before the next allocation, which may evict it."""
        return self._by_hash.get(content_hash)

    def drop_cached(self) -> int:
        """Forgets every cached block, and how to find the held ones; returns how many became free."""
        count = len(self._cached)
        for block in self._by_hash.values():
            self._hashes[block] = None
        self._by_hash.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        return count

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Conservation: free + held + cached = total, and every table entry counted. RuntimeError says what broke.

        `tables` are all lists of held blocks there are, a block once for each time that it is held.
        """
        counts = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._ref_counts):
            if counts[block] != count:
                raise RuntimeError(f"block {block}: ref_count {count}, but tables hold it {counts[block]} times")
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._ref_counts) if count}
        if len(free) != len(self._free) or len(free) + len(cached) + len(held) != self.num_blocks:
            raise RuntimeError(
                f"{len(self._free)} free + {len(cached)} cached + {len(held)} held is not {self.num_blocks} blocks"
            )
        if free & cached or free & held or cached & held:
            raise RuntimeError("a block is in two states at once")
        known = {block: content_hash for block, content_hash in enumerate(self._hashes) if content_hash is not None}
        if {content_hash: block for block, content_hash in known.items()} != self._by_hash:
            raise RuntimeError("hashes of blocks and the index of hashes differ")
        if not cached <= known.keys() or free & known.keys():
            raise RuntimeError("a cached block has no hash, or a free one has")

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        content_hash = self._hashes[block]
        assert content_hash is not None
        self._hashes[block] = None
        del self._by_hash[content_hash]
        if self._on_evict is not None:
            self._on_evict(block, content_hash)
        return block
