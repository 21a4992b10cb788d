"""The memory behind block ids: one device pool of keys and values for all layers, and host slots for swapped blocks.

device   [layer, key | value, block, position in block, kv head, head dim]
host     [slot, layer, key | value, position in block, kv head, head dim]      one block in one piece

In int8 a head's numbers take four bytes more: the fp32 scale of its token. A block keeps its scales wherever it moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.errors import InvalidConfig
from engine.models.config import ModelShape
from engine.plan import BlockMove, StepShape

SCALE_BYTES = 4  # fp32


class KVStorage:
    """Holds and moves blocks; which block belongs to whom is the scheduler's business."""

    def __init__(
        self,
        config: ModelShape,
        block_size: int,
        num_blocks: int,
        num_host_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        block = (block_size, config.num_kv_heads, slot_width(config, dtype))
        layers = (config.num_layers, 2)
        self.num_blocks, self.num_host_slots = num_blocks, num_host_slots
        self.pool = _zeros((*layers, num_blocks, *block), dtype, device)
        if device.type == "cuda" and num_host_slots:  # pinned, so that copies run beside everything else
            self.host = torch.zeros((num_host_slots, *layers, *block), dtype=dtype, pin_memory=True)
        else:
            self.host = _zeros((num_host_slots, *layers, *block), dtype, torch.device("cpu"))
        self._layers = [(layer[0], layer[1]) for layer in self.pool.unbind(0)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(key pool, value pool) of one layer, each [num_blocks, block_size, kv_heads, slot_width]."""
        return self._layers[index]

    def apply(self, plan: StepShape) -> None:
        """The plan's lists of moves in their order, the moves of one list at once; for a pool in host memory.

        Raises IndexError for a block or slot that does not exist; nothing of that list is moved then.
        """
        if plan.swap_out or plan.swap_in or plan.copies:
            self._move(plan)

    @torch.inference_mode()
    def _move(self, plan: StepShape) -> None:
        if plan.swap_out:
            blocks, slots = checked_ids(plan.swap_out, self.num_blocks, self.num_host_slots)
            self.host[slots] = self.pool[:, :, blocks].permute(2, 0, 1, 3, 4, 5)
        if plan.swap_in:
            slots, blocks = checked_ids(plan.swap_in, self.num_host_slots, self.num_blocks)
            self.pool[:, :, blocks] = self.host[slots].permute(1, 2, 0, 3, 4, 5)
        if plan.copies:
            sources, targets = checked_ids(plan.copies, self.num_blocks, self.num_blocks)
            self.pool[:, :, targets] = self.pool[:, :, sources]


def checked_ids(moves: Sequence[BlockMove], num_sources: int, num_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets of moves, each [moves], int64. Raises IndexError for one that does not exist."""
    for move in moves:
        if not (0 <= move.source < num_sources and 0 <= move.target < num_targets):
            raise IndexError(f"{move} is outside of {num_sources} sources and {num_targets} targets")
    return torch.tensor([move.source for move in moves]), torch.tensor([move.target for move in moves])


def slot_width(config: ModelShape, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that the keys, or the values, of one token and head take."""
    return config.head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def block_bytes(config: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * slot_width(config, dtype) * dtype.itemsize


def num_blocks_within(budget: int, bytes_per_block: int) -> int:
    """Blocks that fit so many bytes. Raises InvalidConfig where not one does."""
    if budget < bytes_per_block:
        raise InvalidConfig("kv_cache_memory_bytes", f"leaves {budget} bytes and one block takes {bytes_per_block}")
    return budget // bytes_per_block


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on CPU the system commits their pages at the first write, so a large pool costs nothing at start."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
