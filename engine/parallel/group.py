"""What the ranks of one model do together: each brings its part, and all get the same answer."""

from __future__ import annotations

from typing import Protocol

import torch


class RankGroup(Protocol):
    rank: int
    size: int

    def ordered_sum(self, partial: torch.Tensor) -> torch.Tensor:
        """part[0] + part[1] + ..., in fp32, rounded once to the parts' dtype."""

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The ranks' parts side by side along the last dimension."""

    def least(self, number: int) -> int:
        """The smallest of what the ranks bring."""
