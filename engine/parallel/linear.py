"""Products with a rank's share of a weight, completed over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.linear import Linear
from engine.parallel.group import RankGroup


@dataclass(slots=True)
class SummedLinear(Linear):
    """weight: [out, in / ranks], its columns are the inputs that this rank has. The bias counts once."""

    group: RankGroup

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        total = self.group.ordered_sum(torch.nn.functional.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


@dataclass(slots=True)
class GatheredLinear(Linear):
    """weight: [out / ranks, in]: each rank computes some outputs, and all get all."""

    group: RankGroup

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.gathered(torch.nn.functional.linear(x, self.weight, self.bias))
