"""Which share of a model's weights one rank holds. Pure arithmetic on shapes.

qkv, gate_up     rows        each rank has some query heads with their KV heads, and a slice of the hidden units
attention_out,   columns     ... so its product is a partial sum, added over the ranks in their order
down
head             rows        a slice of the vocabulary, where it divides; else every rank has all
norms, embedding whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.errors import InvalidConfig
from engine.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    size: int  # how many ranks there are

    def rows(self, tensor: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
        """This rank's rows of each part; the parts lie one after another: parts[0] rows, then parts[1], ..."""
        if self.size == 1:
            return tensor
        return torch.cat([self._mine(part, 0) for part in torch.split(tensor, list(parts))])

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._mine(tensor, 1)

    def splits_vocabulary(self, vocab_size: int) -> bool:
        return self.size > 1 and vocab_size % self.size == 0

    def config(self, config: DecoderConfig) -> DecoderConfig:
        """The model as this rank sees it. Raises InvalidConfig where its heads or units cannot be shared out."""
        for what, count in (
            ("query heads", config.num_heads),
            ("KV heads", config.num_kv_heads),
            ("hidden units of its feed-forward part", config.intermediate_size),
        ):
            if count % self.size:
                raise InvalidConfig(
                    "tensor_parallel_size",
                    f"is {self.size} and does not divide the model's {count} {what}; choose a divisor",
                )
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            intermediate_size=config.intermediate_size // self.size,
        )

    def _mine(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length)


WHOLE = Shard(0, 1)
