"""A decoder's matrices in 8 or 4 bits, multiplied by Triton's kernels: on a GPU, where reading weights is what a decode
step waits for. Embedding and norms stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.errors import ModelLoadError
from engine.models.linear import Linear
from engine.models.weights import DecoderWeights
from kernels.quant_matmul import dispatch
from kernels.quant_matmul.dispatch import QuantMatmul
from kernels.quant_matmul.weights import QuantizedWeight, quantize_int4, quantize_int8

Bits = Literal["int8", "int4"]

_GROUP_SIZES = (128, 64, 32)  # of 4 bits: inputs that share a scale; the largest that divides


@dataclass(slots=True)
class QuantizedLinear(Linear):
    """`weight` holds the quantized values alone."""

    quantized: QuantizedWeight
    multiply: QuantMatmul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self.multiply(x, self.quantized)
        return product if self.bias is None else product + self.bias


def quantize(weights: DecoderWeights, bits: Bits, *, is_invariant: bool) -> str:
    """In place, matrix by matrix, so that no second copy of the model is held. Returns what multiplies, and why.

    is_invariant: a row's products must not depend on its batch, though fewer rows could be multiplied faster.

    Raises ModelLoadError for a matrix whose inputs no group of 4-bit values divides.
    """
    choice = dispatch.choose(weights.embedding.device, is_invariant=is_invariant)

    def in_bits(linear: Linear) -> QuantizedLinear:
        quantized = quantize_int8(linear.weight) if bits == "int8" else _int4(linear.weight)
        return QuantizedLinear(quantized.values, linear.bias, quantized, choice.run)

    for layer in weights.layers:
        layer.qkv, layer.attention_out = in_bits(layer.qkv), in_bits(layer.attention_out)
        layer.gate_up, layer.down = in_bits(layer.gate_up), in_bits(layer.down)
    weights.head = in_bits(weights.head)
    return choice.reason


def _int4(weight: torch.Tensor) -> QuantizedWeight:
    num_inputs = weight.shape[1]
    size = next((size for size in _GROUP_SIZES if num_inputs % size == 0), None)
    if size is None:
        raise ModelLoadError(f"a matrix has {num_inputs} inputs, which no group of 32 divides; int4 cannot hold it")
    return quantize_int4(weight, size)
