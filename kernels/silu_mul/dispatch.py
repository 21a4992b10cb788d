"""Chooses how the gate runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.silu_mul.reference import gelu_mul, silu_mul

Activation = Literal["silu", "gelu_tanh"]
GateMul = Callable[[torch.Tensor], torch.Tensor]

_BY_ACTIVATION: dict[Activation, GateMul] = {"silu": silu_mul, "gelu_tanh": gelu_mul}


def choose(activation: Activation, device: torch.device) -> Choice[GateMul]:
    def load() -> GateMul:
        from kernels.silu_mul import triton

        return triton.silu_mul if activation == "silu" else triton.gelu_mul

    return triton_on_gpu(device.type, load, _BY_ACTIVATION[activation])
