"""Chooses how RMS norm runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.rms_norm.reference import add_rms_norm, rms_norm

RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddRmsNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def choose(device: torch.device) -> Choice[RmsNorm]:
    def load() -> RmsNorm:
        from kernels.rms_norm.triton import rms_norm

        return rms_norm

    return triton_on_gpu(device.type, load, rms_norm)


def choose_add(device: torch.device) -> Choice[AddRmsNorm]:
    def load() -> AddRmsNorm:
        from kernels.rms_norm.triton import add_rms_norm

        return add_rms_norm

    return triton_on_gpu(device.type, load, add_rms_norm)
