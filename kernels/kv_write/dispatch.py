"""Chooses how keys and values are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.kv_write.reference import turn_and_write_kv, write_kv

WriteKv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class TurnAndWriteKv(Protocol):
    """(query, key, value, cos, sin, key_pool, value_pool, slots) -> turned query; shapes as in reference.py."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor: ...


def choose(device: torch.device) -> Choice[WriteKv]:
    def load() -> WriteKv:
        from kernels.kv_write.triton import write_kv

        return write_kv

    return triton_on_gpu(device.type, load, write_kv)


def choose_with_rope(device: torch.device) -> Choice[TurnAndWriteKv]:
    def load() -> TurnAndWriteKv:
        from kernels.kv_write.triton import turn_and_write_kv

        return turn_and_write_kv

    return triton_on_gpu(device.type, load, turn_and_write_kv)
