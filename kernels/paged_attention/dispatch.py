"""Chooses how paged attention runs: a function that prepares a step's rows once and returns what every layer calls."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.paged_attention.gathered import GatheredAttention
from kernels.paged_attention.rows import PagedRows, RowTensors


class Attend(Protocol):
    """(query, key_pool, value_pool, scale, softcap) -> output; shapes as in reference.py."""

    def __call__(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor: ...


class PrepareAttention(Protocol):
    def __call__(
        self, rows: PagedRows, device: torch.device, window: int | None, tensors: RowTensors | None = None
    ) -> Attend: ...


def choose(device: torch.device) -> Choice[PrepareAttention]:
    def load() -> PrepareAttention:
        from kernels.paged_attention.triton import TritonAttention

        return TritonAttention

    return triton_on_gpu(device.type, load, GatheredAttention, name="torch")
