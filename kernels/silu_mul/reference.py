"""y = act(gate) * up, where gate and up are the two halves of the last dimension; act is SiLU or tanh-GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [tokens, 2 * size] -> [tokens, size]. SiLU(x) = x / (1 + exp(-x))."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [tokens, 2 * size] -> [tokens, size]. GELU in its tanh form, as Gemma has it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(gate_up.dtype)
