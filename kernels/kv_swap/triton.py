"""host[slot[i], layer, k | v] = pool[layer, k | v, block[i]] and back, bit for bit.

A block lies in 2 x layers pieces in the pool and in one piece on the host. A kernel gathers the pieces on the device;
then the copy engine moves one large piece per block, as fast as the bus allows, beside the step's own kernels.
"""

from __future__ import annotations

import torch

from kernels.block_copy.triton import move_blocks


def swap_out(pool: torch.Tensor, blocks: torch.Tensor, host: torch.Tensor, slots: list[int]) -> None:
    """pool: [layers, 2, blocks, block_size, kv_heads, head_dim]; blocks: [moves], int64, on the pool's device;
    host: [slots, layers, 2, block_size, kv_heads, head_dim], written in place at `slots`, none of them twice.

    Works on the current stream. The copies into pinned host memory may still be under way at return: whoever reads
    `host` or writes the blocks from another stream waits for an event recorded after this call.
    """
    staged = torch.empty((len(slots), *host.shape[1:]), dtype=pool.dtype, device=pool.device)
    move_blocks(_planes(pool), blocks, _staged_planes(staged), _all(staged))
    for piece, slot in zip(staged, slots, strict=True):
        host[slot].copy_(piece, non_blocking=host.is_pinned())


def swap_in(host: torch.Tensor, slots: list[int], pool: torch.Tensor, blocks: torch.Tensor) -> None:
    """The way back, on the current stream; shapes as above, no block twice. The slots may be written again once the
    stream has come past this call.
    """
    staged = torch.empty((len(slots), *host.shape[1:]), dtype=pool.dtype, device=pool.device)
    for piece, slot in zip(staged, slots, strict=True):
        piece.copy_(host[slot], non_blocking=host.is_pinned())
    move_blocks(_staged_planes(staged), _all(staged), _planes(pool), blocks)


def _planes(pool: torch.Tensor) -> torch.Tensor:
    """[2 * layers, blocks, ...]"""
    if not pool.is_contiguous():
        raise ValueError("the pool must be contiguous")
    return pool.view(-1, *pool.shape[2:])


def _staged_planes(staged: torch.Tensor) -> torch.Tensor:
    """[moves, layers, 2, ...] -> [2 * layers, moves, ...], a view."""
    return staged.flatten(1, 2).transpose(0, 1)


def _all(staged: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(staged), device=staged.device)
