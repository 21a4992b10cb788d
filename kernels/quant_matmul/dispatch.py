"""Chooses how products with quantized weights run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.quant_matmul.reference import quant_matmul
from kernels.quant_matmul.weights import QuantizedWeight

QuantMatmul = Callable[[torch.Tensor, QuantizedWeight], torch.Tensor]


def choose(device: torch.device, is_invariant: bool = False) -> Choice[QuantMatmul]:
    """`is_invariant`: a row's result must not depend on its batch. The reference promises nothing of the kind."""

    def load() -> QuantMatmul:
        from kernels.quant_matmul.triton import quant_matmul

        return partial(quant_matmul, is_invariant=is_invariant)

    return triton_on_gpu(device.type, load, quant_matmul)
