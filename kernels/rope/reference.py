"""Rotary embedding, pairs in halves: with c = cos(position * frequency), s = sin(position * frequency),

    y[i]            = x[i] * c[i] - x[i + half] * s[i]
    y[i + half]     = x[i + half] * c[i] + x[i] * s[i]          for i < half = rotary_dim / 2

Dimensions from `rotary_dim` on pass unchanged (Phi-3's partial rotary).
"""

from __future__ import annotations

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]; cos, sin: [tokens, 1, rotary_dim / 2], fp32. Returns x's shape and dtype."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        rotated.append(x[..., 2 * half :].float())
    return torch.cat(rotated, dim=-1).to(x.dtype)
