"""Chooses how rotary embedding runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.rope.reference import apply_rope

ApplyRope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def choose(device: torch.device) -> Choice[ApplyRope]:
    def load() -> ApplyRope:
        from kernels.rope.triton import apply_rope

        return apply_rope

    return triton_on_gpu(device.type, load, apply_rope)
