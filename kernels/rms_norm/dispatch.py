"""Chooses how RMS norm runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.choice import Choice, the_only_path
from kernels.rms_norm.reference import rms_norm

RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def choose(device: torch.device) -> Choice[RmsNorm]:
    return the_only_path(rms_norm, device.type)
