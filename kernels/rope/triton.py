"""y[i] = x[i] * c[i] - x[i + half] * s[i];  y[i + half] = x[i + half] * c[i] + x[i] * s[i];  the rest unchanged."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS_PER_PROGRAM = 8


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]; cos, sin: [tokens, 1, rotary_dim / 2], fp32; last dimensions contiguous.

    Returns x's shape and dtype.
    """
    num_tokens, num_heads, head_dim = x.shape
    if x.stride(2) != 1 or cos.stride(2) != 1 or cos.stride() != sin.stride():
        raise ValueError("the last dimension of x, cos and sin must be contiguous, and cos and sin laid out alike")
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return turned
    half = cos.shape[-1]
    _apply_rope[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
        x,
        cos,
        sin,
        turned,
        num_heads,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(head_dim - 2 * half),
        HEADS=HEADS_PER_PROGRAM,
        num_warps=2,
    )
    return turned


@triton.jit
def turn_heads(
    x_ptr,  # [HEADS, 1] pointers to the heads
    y_ptr,
    cos_ptr,
    sin_ptr,
    inside,  # [HEADS, 1]
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Turns some heads of one token from x to y, in y's dtype.

    REST_BLOCK: partial rotary (Phi-3) has dimensions that only pass through; 0 leaves their code out.
    """
    i = tl.arange(0, HALF_BLOCK)
    cos = tl.load(cos_ptr + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + i, mask=i < HALF, other=0.0)[None, :]
    mask = inside & (i < HALF)[None, :]
    first = tl.load(x_ptr + i[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + i[None, :] + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + i[None, :], (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + i[None, :] + HALF, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=mask)
    if REST_BLOCK > 0:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        mask = inside & (rest < HEAD_DIM)
        tl.store(y_ptr + rest, tl.load(x_ptr + rest, mask=mask).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _apply_rope(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    num_heads,
    x_token_stride,
    x_head_stride,
    angle_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """y = x turned by its position's angles. One program: HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    turn_heads(
        x_ptr + token * x_token_stride + head * x_head_stride,
        y_ptr + (token * num_heads + head) * HEAD_DIM,
        cos_ptr + token * angle_stride,
        sin_ptr + token * angle_stride,
        head < num_heads,
        HEAD_DIM,
        HALF,
        HALF_BLOCK,
        REST_BLOCK,
    )
