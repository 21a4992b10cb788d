"""y = x / sqrt(mean(x^2) + eps) * weight; with a residual: sum = x + residual, and y of that sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024  # elements of several short rows (a head's norm) that one program takes together


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size], the last dimension contiguous; weight: [size], fp32. Returns x's shape and dtype."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])
    _launch(rows, rows, weight, normed, normed, eps, has_residual=False)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual: [..., size] of one dtype. Returns (normed, x + residual), both of x's shape and dtype."""
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    shape = (1, -1, x.shape[-1])
    _launch(x.reshape(shape), residual.reshape(shape), weight, normed, total, eps, has_residual=True)
    return normed, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    normed: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    has_residual: bool,
) -> None:
    """x: [outer, inner, size] with any two outer strides; residual alike; outputs contiguous."""
    num_outer, num_inner, size = x.shape
    if x.stride(2) != 1 or residual.stride(2) != 1:
        raise ValueError(f"the last dimension must be contiguous; x has strides {x.stride()}")
    num_rows = num_outer * num_inner
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    rows_per_program = max(_TILE // block, 1)  # by the size alone, so that a row's sum does not depend on the batch
    _rms_norm[(triton.cdiv(num_rows, rows_per_program),)](
        x,
        residual,
        weight,
        normed,
        total,
        num_rows,
        num_inner,
        x.stride(0),
        x.stride(1),
        residual.stride(0),
        residual.stride(1),
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=rows_per_program,
        HAS_RESIDUAL=has_residual,
        num_warps=8 if block >= 4096 else 4,
    )


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    num_rows,
    num_inner,
    x_outer_stride,
    x_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """y = x / sqrt(mean(x^2) + eps) * weight, in fp32. One program: ROWS rows of SIZE elements.

    HAS_RESIDUAL: the sum is rounded to x's dtype before it is normed, as two separate steps would do.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    outer, inner = row // num_inner, row % num_inner
    x = tl.load(x_ptr + (outer * x_outer_stride + inner * x_inner_stride)[:, None] + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        starts = (outer * residual_outer_stride + inner * residual_inner_stride)[:, None]
        residual = tl.load(residual_ptr + starts + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row[:, None] * SIZE + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    normed = wide * scale[:, None] * weight[None, :]
    tl.store(normed_ptr + row[:, None] * SIZE + column, normed.to(normed_ptr.dtype.element_ty), mask=inside)
