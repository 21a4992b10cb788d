"""A decoder's weights as plain tensors, with what is multiplied by the same input fused into one matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import ModelLoadError
from engine.models.config import DecoderConfig
from engine.models.linear import Linear
from engine.parallel.group import RankGroup
from engine.parallel.linear import GatheredLinear, SummedLinear
from engine.parallel.shard import WHOLE, Shard
from engine.weights.safetensors import Checkpoint


@dataclass(slots=True)
class LayerWeights:
    """One layer. Norm weights are fp32; None where the family has no such norm."""

    attention_norm: torch.Tensor
    qkv: Linear  # rows: all query heads, then all key heads, then all value heads
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out: Linear
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear  # rows: gate, then up
    down: Linear
    mlp_post_norm: torch.Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: Linear  # hidden -> vocab; shares the embedding's storage where tied


def load_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None = None,
) -> DecoderWeights:
    """Reads every tensor the decoder needs; of a group of ranks, this rank's share of it. `config`: of the whole model.

    Raises ModelLoadError for a tensor that is missing or of a wrong shape.
    """
    return _Loader(checkpoint, config, dtype, device, group).load()


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None,
    ) -> None:
        self._group = group
        self._shard = WHOLE if group is None else Shard(group.rank, group.size)
        self._checkpoint, self._config, self._dtype, self._device = checkpoint, config, dtype, device
        embeddings = [name for name in checkpoint.names if name.endswith("embed_tokens.weight")]
        if len(embeddings) != 1:
            raise ModelLoadError(f"{checkpoint.folder} has {len(embeddings)} tensors named *embed_tokens.weight, not 1")
        self._prefix = embeddings[0].removesuffix("embed_tokens.weight")  # "model.", or deeper in a multimodal file

    def load(self) -> DecoderWeights:
        config = self._config
        embedding = self._read(f"{self._prefix}embed_tokens.weight", (config.vocab_size, config.hidden_size))
        head = embedding if config.is_tied else self._read("lm_head.weight", tuple(embedding.shape))
        return DecoderWeights(
            embedding=embedding,
            layers=[self._layer(f"{self._prefix}layers.{index}.") for index in range(config.num_layers)],
            final_norm=self._norm(f"{self._prefix}norm", config.hidden_size),
            head=self._head(head),
        )

    def _head(self, weight: torch.Tensor) -> Linear:
        vocab_size = self._config.vocab_size
        if self._group is None or not self._shard.splits_vocabulary(vocab_size):
            return Linear(weight, None)
        return GatheredLinear(self._shard.rows(weight, [vocab_size]), None, self._group)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        mlp_norm = "pre_feedforward_layernorm" if config.has_post_norms else "post_attention_layernorm"
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        halves = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        return LayerWeights(
            attention_norm=self._norm(f"{prefix}input_layernorm", config.hidden_size),
            qkv=self._fused(attention, "qkv_proj", parts, config.hidden_size),
            query_norm=self._optional_norm(f"{attention}q_norm", config.head_dim),
            key_norm=self._optional_norm(f"{attention}k_norm", config.head_dim),
            attention_out=self._summed(f"{attention}o_proj", config.hidden_size, query_size),
            attention_post_norm=self._post_norm(f"{prefix}post_attention_layernorm"),
            mlp_norm=self._norm(f"{prefix}{mlp_norm}", config.hidden_size),
            gate_up=self._fused(mlp, "gate_up_proj", halves, config.hidden_size),
            down=self._summed(f"{mlp}down_proj", config.hidden_size, config.intermediate_size),
            mlp_post_norm=self._post_norm(f"{prefix}post_feedforward_layernorm"),
        )

    def _fused(self, prefix: str, fused: str, parts: dict[str, int], in_size: int) -> Linear:
        """One matrix of all parts: as stored (Phi-3), or joined here."""
        if f"{prefix}{fused}.weight" in self._checkpoint:
            return self._linear(f"{prefix}{fused}", list(parts.values()), in_size)
        linears = [self._linear(f"{prefix}{name}", [out_size], in_size) for name, out_size in parts.items()]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if biases and len(biases) < len(linears):
            raise ModelLoadError(f"{self._checkpoint.folder}: only some of {prefix}* have a bias")
        weight = torch.cat([linear.weight for linear in linears])
        return Linear(weight, torch.cat(biases) if biases else None)

    def _linear(self, name: str, out_sizes: list[int], in_size: int) -> Linear:
        """This rank's outputs of each of the parts that the matrix has."""
        bias = f"{name}.bias"

        def mine(tensor: torch.Tensor) -> torch.Tensor:
            return self._shard.rows(tensor, out_sizes)

        return Linear(
            self._read(f"{name}.weight", (sum(out_sizes), in_size), share=mine),
            self._read(bias, (sum(out_sizes),), share=mine) if bias in self._checkpoint else None,
        )

    def _summed(self, name: str, out_size: int, in_size: int) -> Linear:
        """This rank's inputs of a matrix whose product is added up over the ranks."""
        weight = self._read(f"{name}.weight", (out_size, in_size), share=self._shard.columns)
        bias = self._read(f"{name}.bias", (out_size,)) if f"{name}.bias" in self._checkpoint else None
        return Linear(weight, bias) if self._group is None else SummedLinear(weight, bias, self._group)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self._read(f"{name}.weight", (size,), torch.float32) + self._config.norm_offset

    def _optional_norm(self, name: str, size: int) -> torch.Tensor | None:
        return self._norm(name, size) if f"{name}.weight" in self._checkpoint else None

    def _post_norm(self, name: str) -> torch.Tensor | None:
        return self._norm(name, self._config.hidden_size) if self._config.has_post_norms else None

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        share: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> torch.Tensor:
        tensor = self._checkpoint.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(f"{self._checkpoint.folder}: {name} is {tuple(tensor.shape)}, not {shape}")
        return share(tensor).to(device=self._device, dtype=dtype or self._dtype)
