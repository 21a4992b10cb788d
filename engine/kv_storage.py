"""The memory behind block ids: one device pool of keys and values for all layers, and host slots for swapped blocks.

device   [layer, key | value, block, position in block, kv head, head dim]
host     [slot, layer, key | value, position in block, kv head, head dim]      one block in one piece
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.models.config import ModelShape
from engine.plan import BlockMove, Plan


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
        block = (block_size, config.num_kv_heads, config.head_dim)
        layers = (config.num_layers, 2)
        self.num_blocks, self.num_host_slots = num_blocks, num_host_slots
        self._pool = _zeros((*layers, num_blocks, *block), dtype, device)
        self._host = _zeros((num_host_slots, *layers, *block), dtype, torch.device("cpu"))
        if device.type == "cuda" and num_host_slots:
            self._host = self._host.pin_memory()
        self._layers = [(layer[0], layer[1]) for layer in self._pool.unbind(0)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(key pool, value pool) of one layer, each [num_blocks, block_size, kv_heads, head_dim]."""
        return self._layers[index]

    @torch.inference_mode()
    def apply(self, plan: Plan) -> None:
        """The plan's lists of moves in their order, the moves of one list at once.

        Raises IndexError for a block or slot that does not exist; nothing of that list is moved then.
        """
        if plan.swap_out:
            blocks, slots = self._ids(plan.swap_out, self.num_blocks, self.num_host_slots)
            self._host[slots] = self._pool[:, :, blocks.to(self._pool.device)].permute(2, 0, 1, 3, 4, 5).cpu()
        if plan.swap_in:
            slots, blocks = self._ids(plan.swap_in, self.num_host_slots, self.num_blocks)
            back = self._host[slots].to(self._pool.device).permute(1, 2, 0, 3, 4, 5)
            self._pool[:, :, blocks.to(self._pool.device)] = back
        if plan.copies:
            sources, targets = self._ids(plan.copies, self.num_blocks, self.num_blocks)
            self._pool[:, :, targets.to(self._pool.device)] = self._pool[:, :, sources.to(self._pool.device)]

    @staticmethod
    def _ids(moves: Sequence[BlockMove], num_sources: int, num_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
        for move in moves:
            if not (0 <= move.source < num_sources and 0 <= move.target < num_targets):
                raise IndexError(f"{move} is outside of {num_sources} sources and {num_targets} targets")
        return torch.tensor([move.source for move in moves]), torch.tensor([move.target for move in moves])


def block_bytes(config: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on CPU the system commits their pages at the first write, so a large pool costs nothing at start."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
