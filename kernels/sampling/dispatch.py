"""Chooses how a batch of tokens is drawn."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.sampling.draws import Drawn, Draws, Support, TokenEdits
from kernels.sampling.reference import sample


class Sample(Protocol):
    """(logits, draws, edits, support, mask) -> drawn; shapes as in reference.py."""

    def __call__(
        self,
        logits: torch.Tensor,
        draws: Draws,
        edits: TokenEdits | None = None,
        support: Support | None = None,
        mask: torch.Tensor | None = None,
    ) -> Drawn: ...


def choose(device: torch.device) -> Choice[Sample]:
    def load() -> Sample:
        from kernels.sampling.triton import sample

        return sample

    return triton_on_gpu(device.type, load, sample)
