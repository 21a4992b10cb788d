"""pool[layer, k | v, target[i]] = pool[layer, k | v, source[i]], all moves at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 4096  # elements that one program moves


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """pool: [layers, 2, blocks, block_size, kv_heads, head_dim], written in place; sources, targets: [moves], int64.

    No target twice, and no block is both a source and a target.
    """
    if not pool.is_contiguous():
        raise ValueError("the pool must be contiguous")
    planes = pool.view(-1, *pool.shape[2:])
    move_blocks(planes, sources, planes, targets)


def move_blocks(source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor) -> None:
    """target[plane, target_ids[i]] = source[plane, source_ids[i]] for every plane and i, bit for bit.

    source, target: [planes, blocks, ...] of one dtype, with each block contiguous; the first two strides are free.
    """
    num_planes, num_moves = len(source), len(source_ids)
    block_len = source[0, 0].numel() if source.shape[1] else 0
    if num_moves == 0 or num_planes * block_len == 0:
        return
    _move_blocks[(num_moves, num_planes, triton.cdiv(block_len, _CHUNK))](
        source,
        source_ids,
        target,
        target_ids,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        BLOCK_LEN=block_len,
        CHUNK=_CHUNK,
        num_warps=8,
    )


@triton.jit
def _move_blocks(
    source_ptr,
    source_ids_ptr,
    target_ptr,
    target_ids_ptr,
    source_plane_stride,
    source_block_stride,
    target_plane_stride,
    target_block_stride,
    BLOCK_LEN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """target[plane, target_ids[i]] = source[plane, source_ids[i]]. One program: CHUNK elements of one move's plane."""
    move = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    item = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = item < BLOCK_LEN
    source_ptr += plane * source_plane_stride + tl.load(source_ids_ptr + move) * source_block_stride
    target_ptr += plane * target_plane_stride + tl.load(target_ids_ptr + move) * target_block_stride
    tl.store(target_ptr + item, tl.load(source_ptr + item, mask=inside), mask=inside)
