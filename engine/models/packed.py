"""A decoder's weights as the native CPU path reads them: matrices in panels, for products in float32 or int8.

For float32 each matrix takes the smallest form that keeps its floats to the bit; for int8 one that came in 4 bits stays
as it is, and any other is rounded to 8. Names: `embedding`, `final_norm`, `head`, and for each layer
`layers.<index>.` with a field of LayerWeights. A matrix in int8 has its scales beside it, `<name>.scales`.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch.nn.functional import pad

from engine.models.weights import DecoderWeights
from kernels.cpu.library import CODE_GROUP, Form, Library, Matrix
from kernels.quant_matmul.weights import quantize_int8

WeightsDtype = Literal["float32", "int8"]
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "query_norm", "key_norm")
MATRICES = ("qkv", "attention_out", "gate_up", "down")


class PackedWeights:
    """Tensors by name, and their addresses, which hold as long as this object lives."""

    def __init__(self, tensors: dict[str, torch.Tensor], forms: dict[str, Form]) -> None:
        self.tensors, self.forms = tensors, forms

    def address(self, name: str) -> int:
        """0 where the model has no such tensor."""
        tensor = self.tensors.get(name)
        return 0 if tensor is None else tensor.data_ptr()

    def matrix(self, name: str) -> Matrix:
        return Matrix(self.address(name), self.address(f"{name}.scales"), self.forms[name])

    def kept(self) -> str:
        """The matrices' forms and sizes, for people."""
        sizes: Counter[str] = Counter()
        for name, form in self.forms.items():
            sizes[form.name.lower()] += self.tensors[name].nbytes
        return ", ".join(f"{form} {size / 1e6:.0f} MB" for form, size in sizes.most_common())


def pack(weights: DecoderWeights, library: Library, dtype: WeightsDtype, num_threads: int = 1) -> PackedWeights:
    """weights: float32. Embedding and norms stay as they are."""
    tensors = {"embedding": weights.embedding.contiguous(), "final_norm": weights.final_norm.contiguous()}
    forms: dict[str, Form] = {}
    matrices: list[tuple[str, tuple[torch.Tensor, ...]]] = [("head", (weights.head.weight,))]

    def add(matrix: tuple[str, tuple[torch.Tensor, ...]]) -> None:
        """One matrix of its parts' panels. Several parts are padded to whole groups each, so that all have as many."""
        name, parts = matrix
        whole = [pad(part, (0, 0, 0, -len(part) % CODE_GROUP)) for part in parts] if len(parts) > 1 else parts
        weight = torch.cat(whole)
        if dtype == "float32":
            tensors[name], forms[name] = library.pack(weight)
        elif (packed := library.pack_as(Form.GROUPED4, weight)) is not None:  # smaller, and nothing is rounded
            tensors[name], forms[name] = packed, Form.GROUPED4
        else:
            quantized, forms[name] = quantize_int8(weight), Form.CODES
            tensors[name], tensors[f"{name}.scales"] = library.pack_int8(quantized.values, quantized.scales)

    for index, layer in enumerate(weights.layers):
        prefix = f"layers.{index}."
        for name in NORMS:
            if (norm := getattr(layer, name)) is not None:
                tensors[f"{prefix}{name}"] = norm.contiguous()
        if layer.qkv.bias is not None:
            tensors[f"{prefix}qkv_bias"] = layer.qkv.bias.contiguous()
        matrices += [
            (f"{prefix}qkv", (layer.qkv.weight,)),
            (f"{prefix}attention_out", (layer.attention_out.weight,)),
            (f"{prefix}gate_up", layer.gate_up.weight.chunk(2)),
            (f"{prefix}down", (layer.down.weight,)),
        ]
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(add, matrices))
    return PackedWeights(tensors, forms)
