"""Chooses how a batch of tokens is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from kernels.choice import Choice, triton_on_gpu
from kernels.sampling import reference
from kernels.sampling.draws import Drawn, Draws, Support, TokenEdits


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


class Sampling(NamedTuple):
    sample: Sample
    edit: Callable[[torch.Tensor, Draws, TokenEdits], torch.Tensor]  # (logits, draws, edits) -> [draws, vocab]


def choose(device: torch.device) -> Choice[Sampling]:
    def load() -> Sampling:
        from kernels.sampling import triton

        return Sampling(triton.sample, triton.edit)

    return triton_on_gpu(device.type, load, Sampling(reference.sample, reference.edit))
