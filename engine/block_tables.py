"""Gives sequences their blocks and takes them back, and notes the block moves that this costs. Pure.

    block_table:   [  b0  |  b1  |  b2  ]       b0 may be shared: with siblings, or through the prefix cache
    positions:     0      B      2B     3B
                   | computed ..|.. next |      a shared block is copied before its first write (copy-on-write)

Moves belong to the plan in the making. Until `settle` (the plan is committed) or `abandon` (it failed), nothing that
they read is handed out again: not the source of a copy, not a host slot that is read back.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from engine.plan import BlockMove
from engine.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.block_pool import BlockPool
    from engine.host_store import HostKey, HostStore
    from engine.prefix_cache import PrefixCache
    from engine.sequence import Sequence


class _Copy(NamedTuple):
    sequence: Sequence
    place: int  # in its block table
    move: BlockMove


class BlockTables:
    def __init__(self, pool: BlockPool, cache: PrefixCache, host: HostStore) -> None:
        self.pool = pool
        self.cache = cache
        self.host = host
        self.num_swapped_out = 0  # blocks ever copied to the host
        self.num_swapped_in = 0
        self._copies: list[_Copy] = []
        self._swap_out: dict[int, int] = {}  # host slot -> block; a slot that is given anew takes the newer content
        self._swap_in: list[BlockMove] = []
        self._left: list[Sequence] = []  # swapped out by this plan
        self._came: list[Sequence] = []  # with blocks that this plan reads from the host
        self._evicted: list[bytes] = []  # cached on the host by this plan
        self._read_keys: list[HostKey] = []  # pinned until the plan has read them
        self._sources: Counter[int] = Counter()  # blocks held until the plan has copied them

    def evicted(self, block: int, content_hash: bytes) -> None:
        """The pool's `on_evict`: a cached block is about to be overwritten; the second tier keeps it if it can."""
        if self.cache.second_tier:
            slot = self.host.try_cache(content_hash)
            if slot is not None:
                self._swap_out[slot] = block
                self._evicted.append(content_hash)

    def take_moves(self) -> tuple[list[BlockMove], list[BlockMove], list[BlockMove]]:
        """(copies, swap_out, swap_in) of the plan in the making."""
        swap_out = [BlockMove(block, slot) for slot, block in self._swap_out.items()]
        return [copy.move for copy in self._copies], swap_out, self._swap_in.copy()

    def num_short(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks missing from the available ones for the sequence to start and reach `num_tokens`; 0 or less: none.

        Of beams that were swapped: for all of them to go on.
        """
        if sequence.state is SequenceState.SWAPPED:
            return self._return_needs(sequence.group, self._full_places(sequence.group))
        return self._start_needs(num_tokens, *self._find_cached(sequence, num_tokens))

    def try_start(self, sequence: Sequence, num_tokens: int, *, spare: int) -> bool:
        """Gives a waiting sequence the blocks that are there for its first `num_tokens` tokens: cached or swapped.

        Sets num_computed_tokens. The rest is not allocated yet, but False, nothing changed, is returned unless it could
        be and `spare` blocks would still be available. Beams that were swapped come back together.
        """
        if sequence.state is SequenceState.SWAPPED:
            return self._try_return(sequence.group, spare)
        blocks, keys = self._find_cached(sequence, num_tokens)
        if self._start_needs(num_tokens, blocks, keys) > -spare:
            return False
        for block in blocks:
            self.pool.hold(block)
        for key in keys:
            self.host.try_pin(key)
        self._read_keys += keys
        sequence.num_computed_tokens = (len(blocks) + len(keys)) * self.pool.block_size
        sequence.block_table = blocks + self._read(keys)
        sequence.num_registered_blocks = 0
        if keys:
            self._came.append(sequence)
        return True

    def try_grow(self, sequence: Sequence, end: int) -> bool:
        """Makes positions num_computed_tokens..end writable; False, nothing changed, where blocks are missing."""
        table = sequence.block_table
        copies = self._must_copy(sequence)
        needed = copies + max(0, self.pool.num_blocks_for(end) - len(table))
        if needed == 0:
            return True
        blocks = self.pool.try_allocate(needed)
        if blocks is None:
            return False
        if copies:
            index = sequence.num_computed_tokens // self.pool.block_size
            move = BlockMove(table[index], blocks.pop())
            self._sources[move.source] += 1  # this table's hold lives on until the copy is done
            self._copies.append(_Copy(sequence, index, move))
            table[index] = move.target
        table += blocks
        return True

    def shrink(self, sequence: Sequence, num_tokens: int) -> None:
        """Takes back the blocks behind those of its first `num_tokens` tokens: what a rejected tail was given."""
        num_kept = self.pool.num_blocks_for(num_tokens)
        self.pool.release(sequence.block_table[num_kept:])
        del sequence.block_table[num_kept:]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares all blocks of the parent, which must be computed to the same position."""
        for block in parent.block_table:
            self.pool.hold(block)
        child.block_table = parent.block_table.copy()
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_draft_tokens = parent.num_draft_tokens
        child.num_registered_blocks = parent.num_registered_blocks
        child.block_hashes = parent.block_hashes[: parent.num_computed_tokens // self.pool.block_size]

    def regroup(self, sequences: list[Sequence], parents: list[int]) -> None:
        """Sequence i goes on from the blocks of sequences[parents[i]]; blocks that none goes on from are let go.

        All are computed to the same position. Nothing is copied: where two share a block, the first write will.
        """
        before = [(each.block_table, each.block_hashes, each.num_registered_blocks) for each in sequences]
        for sequence, parent in zip(sequences, parents, strict=True):
            table, hashes, num_registered = before[parent]
            for block in table:
                self.pool.hold(block)
            sequence.block_table, sequence.block_hashes = table.copy(), hashes.copy()
            sequence.num_registered_blocks = num_registered
        for table, _, _ in before:
            self.pool.release(table)

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks of the sequence, on the device and on the host; nothing of it counts as computed."""
        self._undo_copy(sequence)
        self.pool.release(sequence.block_table)
        for key in sequence.host_keys:
            self._unpin(key)
        sequence.block_table = []
        sequence.host_keys = []
        sequence.num_computed_tokens = 0
        sequence.num_draft_tokens = 0
        sequence.num_registered_blocks = 0

    def try_swap_out(self, sequences: list[Sequence]) -> bool:
        """Moves the computed blocks to the host, shared ones once; False, nothing moved, where it has no room for all.

        Content that is there already is not copied again. num_computed_tokens stays.
        """
        for sequence in sequences:
            self._undo_copy(sequence)
        keys = [self._keys(sequence) for sequence in sequences]
        if self.host.num_new(chain.from_iterable(keys)) > self.host.num_available:
            return False
        for sequence, its_keys in zip(sequences, keys, strict=True):
            for key, block in zip(its_keys, sequence.block_table, strict=False):
                pinned = self.host.try_pin(key)
                assert pinned is not None
                slot, is_new = pinned
                if is_new:
                    self._swap_out[slot] = block
        for sequence, its_keys in zip(sequences, keys, strict=True):
            self.pool.release(sequence.block_table)
            sequence.block_table = []
            sequence.host_keys = its_keys
            sequence.num_draft_tokens = 0  # what a drafting model computed stays behind
            sequence.num_registered_blocks = 0
        self._left += sequences
        return True

    def settle(self) -> None:
        """The plan's moves are done."""
        self.num_swapped_out += len(self._swap_out)
        self.num_swapped_in += len(self._swap_in)
        for key in self._read_keys:
            self._unpin(key)
        self._forget_moves()

    def abandon(self) -> list[Sequence]:
        """Whether the plan's moves were done is unknown: undoes them, and forgets what they should have brought.

        Returns the sequences whose blocks are lost with them, all released. Computed again they need no moves, so
        moves that always fail stop nobody.
        """
        lost = [*self._left, *self._came, *(copy.sequence for copy in self._copies)]
        for sequence in lost:
            for key in sequence.host_keys:
                self.host.unpin(key, keep=False)
            sequence.host_keys = []
            self.release(sequence)
        for key in self._read_keys:
            self.host.unpin(key, keep=False)
        for content_hash in self._evicted:
            self.host.forget(content_hash)
        self._forget_moves()
        return lost

    def num_unused_slots(self, sequences: Iterable[Sequence]) -> int:
        """Allocated token slots that hold nothing: the tails of last blocks, a shared block counted once."""
        size = self.pool.block_size
        unused: dict[int, int] = {}
        for sequence in sequences:
            num_computed = sequence.num_computed_tokens
            for index in range(num_computed // size, len(sequence.block_table)):
                block = sequence.block_table[index]
                empty = size - max(0, min(size, num_computed - index * size))
                unused[block] = min(empty, unused.get(block, size))
        return sum(unused.values())

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Conservation on the device and on the host. `sequences` are all that may hold blocks."""
        sequences = list(sequences)
        self.pool.check_integrity([*(sequence.block_table for sequence in sequences), self._sources.elements()])
        self.host.check_integrity([*(sequence.host_keys for sequence in sequences), self._read_keys])

    def _find_cached(self, sequence: Sequence, num_tokens: int) -> tuple[list[int], list[HostKey]]:
        """Blocks of a cached prefix on the device, and the keys of those behind them that the host has."""
        blocks, hashes = self.cache.match(sequence, num_tokens)
        return blocks, list(hashes)

    def _start_needs(self, num_tokens: int, blocks: list[int], keys: list[HostKey]) -> int:
        total = max(self.pool.num_blocks_for(num_tokens), len(blocks) + len(keys))
        return total - len(blocks) + self._num_revived(blocks) - self.pool.num_available

    def _split_keys(self, sequence: Sequence) -> tuple[list[HostKey], list[HostKey]]:
        """Of its swapped blocks: the full ones, and the one it writes next if that has something in it."""
        num_full = sequence.num_computed_tokens // self.pool.block_size
        return sequence.host_keys[:num_full], sequence.host_keys[num_full:]

    def _full_places(self, sequences: list[Sequence]) -> dict[HostKey, int | None]:
        """The device block of each full swapped block, None where it must be read; shared ones are there once."""
        return {key: self._on_device(key) for sequence in sequences for key in self._split_keys(sequence)[0]}

    def _return_needs(self, sequences: list[Sequence], places: dict[HostKey, int | None]) -> int:
        """Blocks missing for all to come back and compute what they have."""
        blocks = [block for block in places.values() if block is not None]
        total = len(places)
        for sequence in sequences:
            end = sequence.target if len(sequences) == 1 else sequence.num_tokens  # several had forked before
            num_blocks = max(len(sequence.host_keys), self.pool.num_blocks_for(end))
            total += num_blocks - len(self._split_keys(sequence)[0])
        return total - len(blocks) + self._num_revived(blocks) - self.pool.num_available

    def _try_return(self, sequences: list[Sequence], spare: int) -> bool:
        """Full blocks that were shared are so again; of one that is about to be written everyone reads his own."""
        places = self._full_places(sequences)
        if self._return_needs(sequences, places) > -spare:
            return False
        keys = [self._split_keys(sequence) for sequence in sequences]
        for block in (places[key] for full, _ in keys for key in full):
            if block is not None:
                self.pool.hold(block)
        missing = [key for key, block in places.items() if block is None]
        read = dict(zip(missing, self._read(missing), strict=True))
        for block in (read[key] for full, _ in keys for key in full if key in read):
            self.pool.hold(block)
        self.pool.release(read.values())  # each is held by those whose tables it comes into
        for sequence, (full, last) in zip(sequences, keys, strict=True):
            sequence.block_table = [read[key] if (block := places[key]) is None else block for key in full]
            sequence.block_table += self._read(last)
            sequence.num_registered_blocks = 0
            self._read_keys += sequence.host_keys  # their pins live on until the plan has read them
            sequence.host_keys = []
            if last or read:
                self._came.append(sequence)
        return True

    def _num_revived(self, blocks: list[int]) -> int:
        return sum(1 for block in blocks if self.pool.ref_count(block) == 0)

    def _read(self, keys: list[HostKey]) -> list[int]:
        """New blocks that the plan fills from the host, where the keys are pinned."""
        blocks = self.pool.try_allocate(len(keys))
        assert blocks is not None
        for key, block in zip(keys, blocks, strict=True):
            slot = self.host.get(key)
            assert slot is not None
            self._swap_in.append(BlockMove(slot, block))
        return blocks

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether the next write would go into a block that others hold, too."""
        index, offset = divmod(sequence.num_computed_tokens, self.pool.block_size)
        if not offset:
            return False
        block = sequence.block_table[index]
        return self.pool.ref_count(block) - self._sources[block] > 1

    def _undo_copy(self, sequence: Sequence) -> None:
        for copy in [copy for copy in self._copies if copy.sequence is sequence]:
            self._copies.remove(copy)
            sequence.block_table[copy.place] = copy.move.source
            self._sources[copy.move.source] -= 1
            self.pool.release([copy.move.target])

    def _keys(self, sequence: Sequence) -> list[HostKey]:
        """Of its computed blocks."""
        size, num_computed = self.pool.block_size, sequence.num_computed_tokens
        blocks = sequence.block_table[: self.pool.num_blocks_for(num_computed)]
        return [self._key(block, min(size, num_computed - i * size)) for i, block in enumerate(blocks)]

    def _key(self, block: int, num_tokens: int) -> HostKey:
        return self.pool.hash_of(block) or (block, self.pool.generation(block), num_tokens)

    def _on_device(self, key: HostKey) -> int | None:
        """The device block with that content, if it is still there and will not change."""
        if isinstance(key, bytes):
            return self.pool.lookup(key)
        block, generation, num_tokens = key
        is_same = self.pool.generation(block) == generation and self.pool.ref_count(block) > 0
        return block if is_same and num_tokens == self.pool.block_size else None

    def _unpin(self, key: HostKey) -> None:
        self.host.unpin(key, keep=self.cache.second_tier and isinstance(key, bytes))

    def _forget_moves(self) -> None:
        self.pool.release(list(self._sources.elements()))
        self._sources.clear()
        self._copies.clear()
        self._swap_out.clear()
        self._swap_in.clear()
        self._left.clear()
        self._came.clear()
        self._evicted.clear()
        self._read_keys.clear()
