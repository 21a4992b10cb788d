"""pool[slot[t]] = x[t], where slot = block * block_size + offset inside the block; with rope, keys are turned first."""

from __future__ import annotations

import torch

from kernels.rope.reference import apply_rope


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """key, value: [tokens, kv_heads, head_dim]; pools: [blocks, block_size, kv_heads, head_dim], written in place;
    slots: [tokens], int64, no slot twice. Values are stored in the pool's dtype.
    """
    for x, pool in ((key, key_pool), (value, value_pool)):
        flat = pool.view(-1, *pool.shape[2:])
        flat.index_copy_(0, slots, x.to(pool.dtype))


def turn_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """query: [tokens, heads, head_dim]; key, value and pools as above; cos, sin: [tokens, 1, rotary_dim / 2], fp32.

    Returns the turned query. A turned key is rounded once, to the pool's dtype.
    """
    write_kv(apply_rope(key.float(), cos, sin), value, key_pool, value_pool, slots)
    return apply_rope(query, cos, sin)
