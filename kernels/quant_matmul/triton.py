"""y[m, n] = sum_k x[m, k] * w[n, k], with w as weights.py defines it; products in x's dtype, sums in fp32.

    8 bits   y = scale[n] * (S_0 + S_1 + ...)     S_s: the sum over the s-th SPLIT_INPUTS inputs
    4 bits   y = S_0 + S_1 + ...                  S_s: over them, scale[n, g] * (the sum over group g)

Few rows: one program per split, joined by a second kernel. Many rows: one program walks over all splits. Both add the
same numbers in the same order, so which of them runs changes no bit. The size of the tiles of rows may: it chooses the
matrix instruction. `is_invariant` fixes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.quant_matmul.weights import QuantizedWeight

SPLIT_INPUTS = 1024
_ENOUGH_PROGRAMS = 256  # about two for each multiprocessor of a large GPU: more splitting gains nothing


class _Tile(NamedTuple):
    rows: int
    columns: int
    num_warps: int


_FEW_ROWS = _Tile(rows=16, columns=64, num_warps=4)
_MANY_ROWS = _Tile(rows=64, columns=64, num_warps=4)
_FLOAT32 = _Tile(rows=16, columns=32, num_warps=4)  # no matrix instruction keeps its bits: registers do it


def _tile(num_rows: int, dtype: torch.dtype, is_invariant: bool) -> _Tile:
    if dtype == torch.float32:
        return _FLOAT32
    return _FEW_ROWS if num_rows <= _FEW_ROWS.rows and not is_invariant else _MANY_ROWS


def _step(weight: QuantizedWeight, dtype: torch.dtype) -> int:
    """Inputs of one matrix product: what registers hold without spilling."""
    if weight.bits == 8:
        return 32 if dtype == torch.float32 else 64
    return min(16 if dtype == torch.float32 else 32, weight.group_size // 2)


def quant_matmul(x: torch.Tensor, weight: QuantizedWeight, is_invariant: bool = False) -> torch.Tensor:
    """x: [..., in] -> [..., out], in x's dtype. `is_invariant`: a row's result is the same in any batch."""
    num_outputs, num_inputs = weight.shape
    if x.shape[-1] != num_inputs:
        raise ValueError(f"x has {x.shape[-1]} inputs, the weight {num_inputs}")
    rows = x.reshape(-1, num_inputs).contiguous()
    output = torch.empty((len(rows), num_outputs), dtype=x.dtype, device=x.device)
    if output.numel():
        tile = _tile(len(rows), x.dtype, is_invariant)
        _launch(rows, weight, output, tile)
    return output.view(*x.shape[:-1], num_outputs)


def _launch(x: torch.Tensor, weight: QuantizedWeight, output: torch.Tensor, tile: _Tile) -> None:
    num_rows, (num_outputs, num_inputs) = len(x), weight.shape
    grid = (triton.cdiv(num_outputs, tile.columns), triton.cdiv(num_rows, tile.rows))
    num_splits = triton.cdiv(num_inputs, SPLIT_INPUTS)
    is_split = num_splits > 1 and grid[0] * grid[1] < _ENOUGH_PROGRAMS
    target = output
    if is_split:
        target = torch.empty((num_splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    _matmul[(*grid, num_splits if is_split else 1)](
        x,
        weight.values,
        weight.scales,
        target,
        num_rows,
        num_outputs,
        INPUTS=num_inputs,
        BITS=weight.bits,
        GROUP=weight.group_size,
        SPLIT=SPLIT_INPUTS,
        STEP=_step(weight, x.dtype),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        IS_SPLIT=is_split,
        num_warps=tile.num_warps,
        num_stages=3,
    )
    if is_split:
        _join_splits[(num_rows, triton.cdiv(num_outputs, 1024))](
            target, weight.scales, output, num_outputs, num_splits, BITS=weight.bits, BLOCK=1024, num_warps=4
        )


@triton.jit
def _matmul(
    x_ptr,
    values_ptr,
    scales_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """y = x W^T. One program: ROWS x COLUMNS of the output, and all splits of the inputs.

    IS_SPLIT: one split of them, stored in fp32 without the channel's scale, for `_join_splits`.
    BITS: 4-bit values have a scale for each group, applied to the group's sum; 8-bit ones one for all, applied last.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    has_row, has_column = (row < num_rows)[:, None], (column < num_outputs)[None, :]
    x_ptr += row.to(tl.int64)[:, None] * INPUTS
    if IS_SPLIT:
        first_split = tl.program_id(2)
        end_split = first_split + 1
    else:
        first_split = 0
        end_split = tl.cdiv(INPUTS, SPLIT)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for split in range(first_split, end_split):
        start, end = split * SPLIT, tl.minimum((split + 1) * SPLIT, INPUTS)
        if BITS == 8:
            part = _sum_int8(x_ptr, values_ptr, start, end, column, has_row, has_column, INPUTS, STEP, ROWS, COLUMNS)
        else:
            part = _sum_int4(
                x_ptr,
                values_ptr,
                scales_ptr,
                start,
                end,
                column,
                has_row,
                has_column,
                INPUTS,
                GROUP,
                STEP,
                ROWS,
                COLUMNS,
            )
        total += part
    place = row.to(tl.int64)[:, None] * num_outputs + column[None, :]
    if IS_SPLIT:
        place += tl.program_id(2).to(tl.int64) * num_rows * num_outputs
    elif BITS == 8:
        total *= tl.load(scales_ptr + column[None, :], mask=has_column, other=0.0)
    tl.store(output_ptr + place, total.to(output_ptr.dtype.element_ty), mask=has_row & has_column)


@triton.jit
def _sum_int8(
    x_ptr,  # [ROWS, 1] pointers to the rows
    values_ptr,
    start,
    end,
    column,
    has_row,
    has_column,
    INPUTS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum over k from start to end of x[m, k] * value[n, k]: [ROWS, COLUMNS]."""
    part = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    column_ptr = values_ptr + column.to(tl.int64)[None, :] * INPUTS
    for k in range(start, end, STEP):
        i = k + tl.arange(0, STEP)
        x = tl.load(x_ptr + i[None, :], mask=has_row & (i < end)[None, :], other=0.0)
        value = tl.load(column_ptr + i[:, None], mask=has_column & (i < end)[:, None], other=0)
        part = tl.dot(x, value.to(x.dtype), part, input_precision="ieee")
    return part


@triton.jit
def _sum_int4(
    x_ptr,  # [ROWS, 1] pointers to the rows
    values_ptr,
    scales_ptr,
    start,
    end,
    column,
    has_row,
    has_column,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum over groups g from start to end of scale[n, g] * sum of x[m, k] * (value[n, k] - 8): [ROWS, COLUMNS]."""
    part = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    column_ptr = values_ptr + column.to(tl.int64)[None, :] * (INPUTS // 2)
    scale_ptr = scales_ptr + column.to(tl.int64)[None, :] * (INPUTS // GROUP)
    HALF: tl.constexpr = GROUP // 2
    for k in range(start, end, GROUP):
        product = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for first in range(0, HALF, STEP):
            i = first + tl.arange(0, STEP)
            low_x = tl.load(x_ptr + k + i[None, :], mask=has_row, other=0.0)
            high_x = tl.load(x_ptr + k + HALF + i[None, :], mask=has_row, other=0.0)
            packed = tl.load(column_ptr + k // 2 + i[:, None], mask=has_column, other=0)
            low = ((packed & 15).to(tl.int8) - 8).to(low_x.dtype)
            high = ((packed >> 4).to(tl.int8) - 8).to(low_x.dtype)
            product = tl.dot(low_x, low, product, input_precision="ieee")
            product = tl.dot(high_x, high, product, input_precision="ieee")
        part += product * tl.load(scale_ptr + k // GROUP, mask=has_column, other=0.0)
    return part


@triton.jit
def _join_splits(parts_ptr, scales_ptr, output_ptr, num_outputs, num_splits, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """y = scale * (S_0 + S_1 + ...), in this order; 4-bit sums are scaled already. One program: BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_outputs
    num_rows = tl.num_programs(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(num_splits):
        total += tl.load(parts_ptr + (split * num_rows + row) * num_outputs + column, mask=inside, other=0.0)
    if BITS == 8:
        total *= tl.load(scales_ptr + column, mask=inside, other=0.0)
    tl.store(output_ptr + row * num_outputs + column, total.to(output_ptr.dtype.element_ty), mask=inside)
