"""Chooses how proposals are verified."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.verify.reference import count_accepted

CountAccepted = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def choose(device: torch.device) -> Choice[CountAccepted]:
    def load() -> CountAccepted:
        from kernels.verify.triton import count_accepted

        return count_accepted

    return triton_on_gpu(device.type, load, count_accepted)
