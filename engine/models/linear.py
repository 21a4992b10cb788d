"""A product with a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Linear:
    """y = x @ weight.T + bias. weight: [out, in]; bias: [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)
