"""y[m, n] = sum_k x[m, k] * w[n, k], with w as weights.py defines it, in fp32."""

from __future__ import annotations

import torch

from kernels.quant_matmul.weights import QuantizedWeight, dequantize

CODE_GROUP = 32  # inputs of a row that share a scale where activations are int8 too


def quant_matmul(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x: [..., in] -> [..., out], in x's dtype."""
    return (x.float() @ dequantize(weight).T).to(x.dtype)


def coded_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The int8 product of the native CPU path, in fp64: x is first rounded to the nearest of 255 steps of each group of
    32 inputs of each row, so that a group's sum is one of integers.

    x: [rows, in] fp32, weight: [out, in] -> [rows, out]
    """
    rows, num_inputs = x.shape
    groups = torch.nn.functional.pad(x, (0, -num_inputs % CODE_GROUP)).view(rows, -1, CODE_GROUP)
    largest = groups.abs().amax(dim=2, keepdim=True)
    steps = torch.where(largest > 4e-37, torch.full_like(largest, 127).div(largest), 0)  # 127 / tensor rounds twice
    codes = (groups * steps).round()  # of two equally near the even one
    coded = (codes.double() * (largest.double() / 127)).view(rows, -1)[:, :num_inputs]
    return coded @ weight.double().T
