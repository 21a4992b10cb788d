"""y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension, in fp32; with a residual, of x + residual."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size]; weight: [size], fp32. Returns x's shape and dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual: [..., size] of one dtype. Returns (normed, x + residual): the sum in that dtype, the norm of it."""
    total = x + residual
    return rms_norm(total, weight, eps), total
