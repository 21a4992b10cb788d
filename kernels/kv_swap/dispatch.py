"""Chooses how blocks are swapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.kv_swap import reference


class Swap(NamedTuple):
    out: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[int]], None]  # (pool, blocks, host, slots)
    back: Callable[[torch.Tensor, list[int], torch.Tensor, torch.Tensor], None]  # (host, slots, pool, blocks)


def choose(device: torch.device) -> Choice[Swap]:
    def load() -> Swap:
        from kernels.kv_swap import triton

        return Swap(triton.swap_out, triton.swap_in)

    return triton_on_gpu(device.type, load, Swap(reference.swap_out, reference.swap_in))
