"""Chooses how keys and values are written."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.choice import Choice, the_only_path
from kernels.kv_write.reference import write_kv

WriteKv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def choose(device: torch.device) -> Choice[WriteKv]:
    return the_only_path(write_kv, device.type)
