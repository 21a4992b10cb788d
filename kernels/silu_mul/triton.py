"""y = act(gate) * up, where gate and up are the two halves of the last dimension; act is SiLU or tanh-GELU."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_TWICE_SQRT_2_OVER_PI = tl.constexpr(2 * math.sqrt(2 / math.pi))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [tokens, 2 * size], rows contiguous -> [tokens, size]. SiLU(x) = x / (1 + exp(-x))."""
    return _launch(gate_up, is_gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [tokens, 2 * size], rows contiguous -> [tokens, size]. GELU in its tanh form, as Gemma has it."""
    return _launch(gate_up, is_gelu=True)


def _launch(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    if gate_up.stride(1) != 1:
        raise ValueError(f"rows must be contiguous; strides are {gate_up.stride()}")
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    gated = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if gated.numel():
        grid = (num_tokens, triton.cdiv(size, _BLOCK))
        _gate_mul[grid](gate_up, gated, gate_up.stride(0), SIZE=size, BLOCK=_BLOCK, IS_GELU=is_gelu, num_warps=4)
    return gated


@triton.jit
def _gate_mul(gate_up_ptr, y_ptr, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr):
    """y = gate * sigmoid(s) * up, in fp32. One program: BLOCK columns of one token.

    SiLU: s = gate. IS_GELU (Gemma): (1 + tanh t) / 2 = sigmoid(2 t), so s = 2 sqrt(2 / pi) (gate + 0.044715 gate^3).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    row_ptr = gate_up_ptr + token * row_stride
    gate = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    steepness = gate
    if IS_GELU:
        steepness = _TWICE_SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    gated = gate * (1 / (1 + tl.exp(-steepness))) * up
    tl.store(y_ptr + token * SIZE + column, gated.to(y_ptr.dtype.element_ty), mask=inside)
