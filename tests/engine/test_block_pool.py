"""The block pool against a plain model of itself, and its promises one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.block_pool import BlockPool


def held(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.try_allocate(count)
    assert blocks is not None
    return blocks


def test_blocks_are_handed_out_once() -> None:
    pool = BlockPool(4, 16)
    first, second = held(pool, 3), held(pool, 1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.try_allocate(1) is None
    pool.check_integrity([first, second])


def test_a_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(3, 16)
    blocks = held(pool, 1)
    assert pool.try_allocate(3) is None
    assert (pool.num_free, pool.num_held, pool.num_cached) == (2, 1, 0)
    pool.check_integrity([blocks])


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2, 16)
    (block,) = held(pool, 1)
    pool.hold(block)
    pool.release([block])
    assert pool.num_held == 1
    pool.release([block])
    assert (pool.num_held, pool.num_free) == (0, 2)


def test_known_content_stays_findable_until_it_is_evicted_least_recently_used_first() -> None:
    evicted: list[tuple[int, bytes]] = []
    pool = BlockPool(3, 16, lambda block, content_hash: evicted.append((block, content_hash)))
    blocks = held(pool, 3)
    for block, content_hash in zip(blocks, [b"a", b"b", b"c"], strict=True):
        assert pool.register(block, content_hash)
        pool.release([block])
    assert (pool.num_cached, pool.num_available, pool.num_held) == (3, 3, 0)
    found = pool.lookup(b"a")
    assert found == blocks[0]
    pool.hold(found)
    pool.release([found])  # used just now
    (again,) = held(pool, 1)
    assert evicted == [(blocks[1], b"b")] and again == blocks[1]
    assert pool.lookup(b"b") is None and pool.lookup(b"a") == blocks[0]
    pool.check_integrity([[again]])


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2, 16)
    (block,) = held(pool, 1)
    pool.register(block, b"a")
    pool.release([block])
    held(pool, 1)
    assert pool.lookup(b"a") == block


def test_of_a_released_table_the_end_is_evicted_first() -> None:
    pool = BlockPool(3, 16)
    table = held(pool, 3)
    for index, block in enumerate(table):
        pool.register(block, bytes([index]))
    pool.release(table)
    held(pool, 1)
    assert pool.lookup(b"\x00") is not None and pool.lookup(b"\x02") is None


def test_content_is_registered_once() -> None:
    pool = BlockPool(2, 16)
    first, second = held(pool, 2)
    assert pool.register(first, b"a")
    assert not pool.register(second, b"a") and not pool.register(first, b"b")
    pool.release([second])
    assert pool.num_free == 1  # nobody knows its content


def test_each_hand_out_is_a_new_generation() -> None:
    pool = BlockPool(1, 16)
    (block,) = held(pool, 1)
    before = pool.generation(block)
    pool.release([block])
    held(pool, 1)
    assert pool.generation(block) == before + 1


def test_misuse_is_an_error() -> None:
    pool = BlockPool(1, 16)
    (block,) = held(pool, 1)
    pool.release([block])
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([block])
    pool = BlockPool(1, 16)
    with pytest.raises(RuntimeError, match="is free"):
        pool.hold(0)
    with pytest.raises(RuntimeError, match="not held"):
        pool.register(0, b"a")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._ref_counts.__setitem__(0, 2),
        lambda pool: pool._by_hash.clear(),
        lambda pool: pool._cached.clear(),
        lambda pool: pool._hashes.__setitem__(3, b"x"),
    ],
)
def test_broken_books_are_found(break_it) -> None:
    pool = BlockPool(4, 16)
    table = held(pool, 2)
    pool.register(table[1], b"a")
    pool.release([table.pop()])
    pool.check_integrity([table])
    break_it(pool)
    with pytest.raises(RuntimeError):
        pool.check_integrity([table])


def test_a_lost_table_is_found() -> None:
    pool = BlockPool(4, 16)
    held(pool, 1)
    with pytest.raises(RuntimeError, match="ref_count 1, but tables hold it 0 times"):
        pool.check_integrity([])


@given(num_tokens=st.integers(0, 10_000), block_size=st.sampled_from([8, 16, 32, 64]))
def test_blocks_for_tokens(num_tokens: int, block_size: int) -> None:
    num_blocks = BlockPool(1, block_size).num_blocks_for(num_tokens)
    assert num_blocks * block_size >= num_tokens > (num_blocks - 1) * block_size


def test_dropping_the_cache_frees_it() -> None:
    pool = BlockPool(3, 16)
    table = held(pool, 2)
    for index, block in enumerate(table):
        pool.register(block, bytes([index]))
    pool.release([table.pop()])
    assert pool.drop_cached() == 1
    assert (pool.num_free, pool.num_cached) == (2, 0) and pool.lookup(b"\x00") is None
    pool.check_integrity([table])


class PoolMachine(RuleBasedStateMachine):
    """Tables come, share, register and go at random."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.contents: dict[int, bytes] = {}
        self.pool = BlockPool(num_blocks, 16, lambda block, content_hash: self.contents.pop(block))
        self.tables: list[list[int]] = []
        self.num_hashes = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        blocks = self.pool.try_allocate(count)
        assert (blocks is None) == (count > available)
        if blocks is not None:
            assert not set(blocks) & {block for table in self.tables for block in table}
            self.tables.append(blocks)

    @rule(index=st.integers(0, 100), keep=st.integers(0, 5))
    def share(self, index: int, keep: int) -> None:
        if self.tables:
            shared = self.tables[index % len(self.tables)][:keep]
            for block in shared:
                self.pool.hold(block)
            self.tables.append(list(shared))

    @rule(index=st.integers(0, 100))
    def register(self, index: int) -> None:
        for block in self.tables[index % len(self.tables)] if self.tables else []:
            self.num_hashes += 1
            if self.pool.register(block, b"%d" % self.num_hashes):
                self.contents[block] = b"%d" % self.num_hashes

    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        if self.tables:
            self.pool.release(self.tables.pop(index % len(self.tables)))

    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        if self.contents:
            block = data.draw(st.sampled_from(sorted(self.contents)))
            assert self.pool.lookup(self.contents[block]) == block
            self.pool.hold(block)
            self.tables.append([block])

    @invariant()
    def books_are_true(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity(self.tables)
            assert self.pool.num_held == len({block for table in self.tables for block in table})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
