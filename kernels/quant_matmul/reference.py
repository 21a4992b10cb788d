"""y[m, n] = sum_k x[m, k] * w[n, k], with w as weights.py defines it, in fp32."""

from __future__ import annotations

import torch

from kernels.quant_matmul.weights import QuantizedWeight, dequantize


def quant_matmul(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x: [..., in] -> [..., out], in x's dtype."""
    return (x.float() @ dequantize(weight).T).to(x.dtype)
