"""A decoder's weights in the form that the native CPU path reads: matrices in panels, float32 or int8.

Names: `embedding`, `final_norm`, `head`, and for each layer `layers.<index>.` with a field of LayerWeights. A matrix in
int8 has its scales beside it, `<name>.scales`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import pad

from engine.models.weights import DecoderWeights
from kernels.cpu.library import CODE_GROUP, Library, Matrix
from kernels.quant_matmul.weights import quantize_int8

WeightsDtype = Literal["float32", "int8"]
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "query_norm", "key_norm")
MATRICES = ("qkv", "attention_out", "gate_up", "down")


class PackedWeights:
    """Tensors by name, and their addresses, which hold as long as this object lives."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def address(self, name: str) -> int:
        """0 where the model has no such tensor."""
        tensor = self.tensors.get(name)
        return 0 if tensor is None else tensor.data_ptr()

    def matrix(self, name: str) -> Matrix:
        return Matrix(self.address(name), self.address(f"{name}.scales"))


def pack(weights: DecoderWeights, library: Library, dtype: WeightsDtype) -> PackedWeights:
    """weights: float32. Embedding and norms stay as they are."""
    tensors = {"embedding": weights.embedding.contiguous(), "final_norm": weights.final_norm.contiguous()}

    def add(name: str, *parts: torch.Tensor) -> None:
        """One matrix of its parts' panels. Several parts are padded to whole groups each, so that all have as many."""
        whole = [pad(part, (0, 0, 0, -len(part) % CODE_GROUP)) for part in parts] if len(parts) > 1 else parts
        if dtype == "float32":
            tensors[name] = library.pack(torch.cat(whole))
            return
        quantized = quantize_int8(torch.cat(whole))
        tensors[name], tensors[f"{name}.scales"] = library.pack_int8(quantized.values, quantized.scales)

    add("head", weights.head.weight)
    for index, layer in enumerate(weights.layers):
        prefix = f"layers.{index}."
        for name in NORMS:
            if (norm := getattr(layer, name)) is not None:
                tensors[f"{prefix}{name}"] = norm.contiguous()
        add(f"{prefix}qkv", layer.qkv.weight)
        if layer.qkv.bias is not None:
            tensors[f"{prefix}qkv_bias"] = layer.qkv.bias.contiguous()
        add(f"{prefix}attention_out", layer.attention_out.weight)
        add(f"{prefix}gate_up", *layer.gate_up.weight.chunk(2))
        add(f"{prefix}down", layer.down.weight)
    return PackedWeights(tensors)
