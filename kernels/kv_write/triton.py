"""pool[slot[t]] = x[t], where slot = block * block_size + offset inside the block; with rope, keys are turned first.

A negative slot is nobody's: such a token, which only fills a captured graph's batch, writes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.rope.triton import HEADS_PER_PROGRAM, turn_heads


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """key, value: [tokens, kv_heads, head_dim]; pools: [blocks, block_size, kv_heads, head_dim], written in place;
    slots: [tokens], int64, no slot twice, below 0 to write nothing. Values are stored in the pool's dtype.
    """
    _check_layouts(key, value, key_pool, value_pool)
    num_tokens, num_heads, head_dim = key.shape
    if key.numel() == 0:
        return
    _write_kv[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
        key,
        value,
        key_pool,
        value_pool,
        slots,
        num_heads,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        HEADS=HEADS_PER_PROGRAM,
        num_warps=2,
    )


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
    """rope and write_kv in one pass over q, k and v: [tokens, heads or kv_heads, head_dim]; cos, sin: [tokens, 1,
    rotary_dim / 2], fp32. Returns the turned query; the turned key and the value go to the pools.
    """
    _check_layouts(key, value, key_pool, value_pool)
    if query.stride(2) != 1 or cos.stride(2) != 1 or cos.stride() != sin.stride():
        raise ValueError("the last dimension of query, cos and sin must be contiguous, and cos and sin laid out alike")
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, half = key.shape[1], cos.shape[-1]
    turned = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return turned
    num_query_programs = triton.cdiv(num_heads, HEADS_PER_PROGRAM)
    _turn_and_write_kv[(num_tokens, num_query_programs + triton.cdiv(num_kv_heads, HEADS_PER_PROGRAM))](
        query,
        key,
        value,
        cos,
        sin,
        turned,
        key_pool,
        value_pool,
        slots,
        num_heads,
        num_kv_heads,
        num_query_programs,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cos.stride(0),
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(head_dim - 2 * half),
        HEADS=HEADS_PER_PROGRAM,
        num_warps=2,
    )
    return turned


def _check_layouts(key: torch.Tensor, value: torch.Tensor, *pools: torch.Tensor) -> None:
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("the last dimension of key and value must be contiguous")
    if not all(pool.is_contiguous() for pool in pools):
        raise ValueError("pools must be contiguous")


@triton.jit
def _copy_heads(x_ptr, y_ptr, inside, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """Some heads of one token ([HEADS, 1] pointers) from x to y, in y's dtype."""
    i = tl.arange(0, DIM_BLOCK)[None, :]
    mask = inside & (i < HEAD_DIM)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=mask).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_kv(
    key_ptr,
    value_ptr,
    key_pool_ptr,
    value_pool_ptr,
    slots_ptr,
    num_heads,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """pool[slot[t]] = x[t] for x = key and value. One program: HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    slot = tl.load(slots_ptr + token)
    place = (slot * num_heads + head) * HEAD_DIM
    inside = (head < num_heads) & (slot >= 0)
    key = key_ptr + token * key_token_stride + head * key_head_stride
    value = value_ptr + token * value_token_stride + head * value_head_stride
    _copy_heads(key, key_pool_ptr + place, inside, HEAD_DIM, DIM_BLOCK)
    _copy_heads(value, value_pool_ptr + place, inside, HEAD_DIM, DIM_BLOCK)


@triton.jit
def _turn_and_write_kv(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    turned_ptr,
    key_pool_ptr,
    value_pool_ptr,
    slots_ptr,
    num_heads,
    num_kv_heads,
    num_query_programs,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    angle_stride,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """turned = rope(query); key_pool[slot] = rope(key); value_pool[slot] = value.

    One program: HEADS query heads of one token, or HEADS key heads and the same value heads.
    """
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    cos_ptr += token * angle_stride
    sin_ptr += token * angle_stride
    if program < num_query_programs:
        head = program * HEADS + tl.arange(0, HEADS)[:, None]
        query = query_ptr + token * query_token_stride + head * query_head_stride
        turned = turned_ptr + (token * num_heads + head) * HEAD_DIM
        turn_heads(query, turned, cos_ptr, sin_ptr, head < num_heads, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK)
    else:
        head = (program - num_query_programs) * HEADS + tl.arange(0, HEADS)[:, None]
        slot = tl.load(slots_ptr + token)
        inside = (head < num_kv_heads) & (slot >= 0)
        place = (slot * num_kv_heads + head) * HEAD_DIM
        key = key_ptr + token * key_token_stride + head * key_head_stride
        value = value_ptr + token * value_token_stride + head * value_head_stride
        turn_heads(key, key_pool_ptr + place, cos_ptr, sin_ptr, inside, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK)
        _copy_heads(value, value_pool_ptr + place, inside, HEAD_DIM, DIM_BLOCK)
