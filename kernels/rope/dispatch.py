"""Chooses how rotary embedding runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.choice import Choice, the_only_path
from kernels.rope.reference import apply_rope

ApplyRope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def choose(device: torch.device) -> Choice[ApplyRope]:
    return the_only_path(apply_rope, device.type)
