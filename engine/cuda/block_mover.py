"""Moves blocks for a plan: swaps on a stream of their own beside the forward, copy-on-write on the main one.

    copy stream   waits for the main stream's past, then swap_out, then swap_in, in the order of plans
    main stream   waits for a swap only before it touches that swap's blocks: the fences

So a device block is used again only after its copy ended, and a sequence that comes back is not read too early.
Host slots belong to the copy stream alone, which keeps their order by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.cuda.device import Device, Event
from engine.cuda.fences import Fences
from engine.cuda.staging import Staging, num_bytes_of
from engine.kv_storage import KVStorage, checked_ids
from engine.plan import BlockMove, RowShape, StepShape
from kernels.block_copy import dispatch as block_copy
from kernels.kv_swap import dispatch as kv_swap

_BLOCKS_AT_ONCE = 32  # bounds the device memory that a swap gathers blocks in
_MAX_COPIES = 1024  # copy-on-write moves of one upload


class BlockMover:
    def __init__(self, device: Device, kv: KVStorage, block_size: int) -> None:
        self._device, self._kv, self._block_size = device, kv, block_size
        self._stream = device.new_stream()
        self._fences: Fences[Event] = Fences()
        ids = {"blocks": np.zeros(_BLOCKS_AT_ONCE, dtype=np.int64)}
        pairs = {name: np.zeros(_MAX_COPIES, dtype=np.int64) for name in ("sources", "targets")}
        self._swap_staging = Staging(device, num_bytes_of(ids), self._stream)
        self._copy_staging = Staging(device, num_bytes_of(pairs))
        swap, copy = kv_swap.choose(device.torch_device), block_copy.choose(device.torch_device)
        self._swap, self._copy_blocks = swap.run, copy.run
        self.choices = {"kv_swap": swap.reason, "block_copy": copy.reason}

    def move(self, plan: StepShape) -> None:
        """Starts the plan's moves. Raises IndexError for a block or slot that does not exist, nothing moved."""
        kv = self._kv
        for moves, num_sources, num_targets in (
            (plan.swap_out, kv.num_blocks, kv.num_host_slots),
            (plan.swap_in, kv.num_host_slots, kv.num_blocks),
            (plan.copies, kv.num_blocks, kv.num_blocks),
        ):
            checked_ids(moves, num_sources, num_targets)
        if plan.swap_out or plan.swap_in:
            self._stream.wait(self._device.main.record())
        if plan.swap_out:
            self._swap_out(plan.swap_out)
        if plan.swap_in:
            self._swap_in(plan.swap_in)
        if plan.copies:
            self._copy(plan.copies)

    def wait_for(self, rows: Sequence[RowShape]) -> None:
        """The main stream goes on once the blocks that these rows read and write are theirs."""
        if len(self._fences):
            size = self._block_size
            self._wait(
                reading=[block for row in rows for block in row.block_table[: -(-row.end // size)]],
                writing=[block for row in rows for block in row.block_table[row.start // size : -(-row.end // size)]],
            )

    def finish(self) -> None:
        """The host waits for all moves."""
        self._stream.record().wait()
        self._device.main.record().wait()

    def _swap_out(self, moves: Sequence[BlockMove]) -> None:
        pool, host = self._kv.pool, self._kv.host
        for some in _pieces(moves, _BLOCKS_AT_ONCE):
            blocks, slots = [move.source for move in some], [move.target for move in some]
            ids = self._swap_staging.upload({"blocks": np.array(blocks, dtype=np.int64)})["blocks"]
            self._start(lambda ids=ids, slots=slots: self._swap.out(pool, ids, host, slots))  # type: ignore[misc]
        self._fences.are_read([move.source for move in moves], self._stream.record())

    def _swap_in(self, moves: Sequence[BlockMove]) -> None:
        pool, host = self._kv.pool, self._kv.host
        for some in _pieces(moves, _BLOCKS_AT_ONCE):
            slots, blocks = [move.source for move in some], [move.target for move in some]
            ids = self._swap_staging.upload({"blocks": np.array(blocks, dtype=np.int64)})["blocks"]
            self._start(lambda ids=ids, slots=slots: self._swap.back(host, slots, pool, ids))  # type: ignore[misc]
        self._fences.are_written([move.target for move in moves], self._stream.record())

    def _copy(self, moves: Sequence[BlockMove]) -> None:
        self._wait(reading=[move.source for move in moves], writing=[move.target for move in moves])
        for some in _pieces(moves, _MAX_COPIES):
            sources = np.array([move.source for move in some], dtype=np.int64)
            targets = np.array([move.target for move in some], dtype=np.int64)
            ids = self._copy_staging.upload({"sources": sources, "targets": targets})
            self._device.main.run(lambda ids=ids: self._copy_blocks(self._kv.pool, ids["sources"], ids["targets"]))  # type: ignore[misc]

    def _wait(self, reading: list[int], writing: list[int]) -> None:
        for event in self._fences.before(reading=reading, writing=writing):
            self._device.main.wait(event)

    def _start(self, operation: Callable[[], None]) -> None:
        self._stream.run(torch.inference_mode()(operation))


def _pieces(moves: Sequence[BlockMove], size: int) -> list[Sequence[BlockMove]]:
    return [moves[start : start + size] for start in range(0, len(moves), size)]
