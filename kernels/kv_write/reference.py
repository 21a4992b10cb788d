"""pool[slot[t]] = x[t], where slot = block * block_size + offset inside the block."""

from __future__ import annotations

import torch


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """key, value: [tokens, kv_heads, head_dim]; pools: [blocks, block_size, kv_heads, head_dim], written in place;
    slots: [tokens], int64, no slot twice. Values are stored in the pool's dtype.
    """
    for x, pool in ((key, key_pool), (value, value_pool)):
        flat = pool.view(-1, *pool.shape[2:])
        flat.index_copy_(0, slots, x.to(pool.dtype))
