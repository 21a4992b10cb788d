"""host[slot[i], layer, k | v] = pool[layer, k | v, block[i]] and back, bit for bit."""

from __future__ import annotations

import torch


def swap_out(pool: torch.Tensor, blocks: torch.Tensor, host: torch.Tensor, slots: list[int]) -> None:
    """pool: [layers, 2, blocks, block_size, kv_heads, head_dim]; blocks: [moves], int64, on the pool's device;
    host: [slots, layers, 2, block_size, kv_heads, head_dim], written in place at `slots`, none of them twice.
    """
    host[slots] = pool[:, :, blocks].permute(2, 0, 1, 3, 4, 5).to(host.device)


def swap_in(host: torch.Tensor, slots: list[int], pool: torch.Tensor, blocks: torch.Tensor) -> None:
    """The way back; shapes as above, no block twice."""
    pool[:, :, blocks] = host[slots].to(pool.device).permute(1, 2, 0, 3, 4, 5)
