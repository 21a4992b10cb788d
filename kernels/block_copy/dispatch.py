"""Chooses how blocks are copied."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.block_copy.reference import copy_blocks
from kernels.choice import Choice, triton_on_gpu

CopyBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # (pool, sources, targets)


def choose(device: torch.device) -> Choice[CopyBlocks]:
    def load() -> CopyBlocks:
        from kernels.block_copy.triton import copy_blocks

        return copy_blocks

    return triton_on_gpu(device.type, load, copy_blocks)
