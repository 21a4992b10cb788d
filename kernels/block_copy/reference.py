"""pool[layer, k | v, target[i]] = pool[layer, k | v, source[i]], all moves at once."""

from __future__ import annotations

import torch


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """pool: [layers, 2, blocks, block_size, kv_heads, head_dim], written in place; sources, targets: [moves], int64.

    No target twice, and no block is both a source and a target.
    """
    pool[:, :, targets] = pool[:, :, sources]
