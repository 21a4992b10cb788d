"""Weights of 8 bits, one scale per output channel, or of 4 bits, one scale per group of inputs:

    8 bits   w[n, k] = value[n, k] * scale[n, 0]                      value in -127 .. 127
    4 bits   w[n, k] = (value[n, k] - 8) * scale[n, k / group_size]   value in 0 .. 15

A byte of a 4-bit group holds two inputs that lie half a group apart, so that unpacking moves nothing between lanes:
the low bits of byte j are input j of the group, the high bits input j + group_size / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    values: torch.Tensor  # 8 bits: [out, in], int8; 4 bits: [out, in / 2], uint8
    scales: torch.Tensor  # [out, in / group_size], fp32
    bits: Literal[8, 4]
    group_size: int  # inputs per scale; 8 bits: all of them

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return len(self.values), self.values.shape[1] * (8 // self.bits)


def quantize_int8(weight: torch.Tensor) -> QuantizedWeight:
    """weight: [out, in], any float dtype; rounds to the nearest of 255 steps of each output channel."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / 127
    values = _divide(wide, scales).round().to(torch.int8)
    return QuantizedWeight(values, scales, 8, weight.shape[1])


def quantize_int4(weight: torch.Tensor, group_size: int) -> QuantizedWeight:
    """weight: [out, in], any float dtype, in a multiple of group_size; group_size: a power of two, 32 or more.

    The largest of a group by magnitude falls on -8, the end of the range that has one step more.
    """
    num_outputs, num_inputs = weight.shape
    if group_size < 32 or group_size & (group_size - 1) or num_inputs % group_size:
        raise ValueError(f"groups of {group_size} do not divide {num_inputs} inputs; take 32, 64 or 128 that do")
    groups = weight.float().view(num_outputs, -1, group_size)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scales = extreme / -8
    values = (_divide(groups, scales).round().clamp(-8, 7) + 8).to(torch.uint8)
    low, high = values.chunk(2, dim=2)
    packed = (low | high << 4).view(num_outputs, num_inputs // 2)
    return QuantizedWeight(packed, scales.squeeze(2), 4, group_size)


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """[out, in], fp32"""
    num_outputs, num_inputs = weight.shape
    if weight.bits == 8:
        return weight.values.float() * weight.scales
    packed = weight.values.view(num_outputs, -1, weight.group_size // 2)
    values = torch.cat((packed & 15, packed >> 4), dim=2).float() - 8
    return (values * weight.scales[:, :, None]).view(num_outputs, num_inputs)


def _divide(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Where all is zero, so is the scale, and the quotient."""
    return torch.where(scales == 0, 0, values / scales)
