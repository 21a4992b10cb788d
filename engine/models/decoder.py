"""The forward pass: one batch of prefill chunks and decodes, all tokens flat, keys and values in the paged pool."""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.kv_storage import KVStorage
from engine.models.config import DecoderConfig
from engine.models.rope import rope_table
from engine.models.weights import DecoderWeights, LayerWeights
from kernels.kv_write import dispatch as kv_write
from kernels.paged_attention import dispatch as paged_attention
from kernels.paged_attention.dispatch import Attend
from kernels.rms_norm import dispatch as rms_norm
from kernels.silu_mul import dispatch as silu_mul

Attends = dict[int | None, Attend]  # by window


class Decoder:
    """Weights and the chosen kernels. `choices` says for each op what runs and why."""

    best_ids = None  # of the last forward's logits: the native path finds them on the way

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, max_model_len: int, device: torch.device
    ) -> None:
        self.config = config
        self.device, self.index_dtype = device, torch.int64
        self._weights = weights
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype, device=device)
        self._rope_tables = [rope_table(kind, max_model_len).to(device) for kind in config.ropes]
        norm, add_norm = rms_norm.choose(device), rms_norm.choose_add(device)
        gate = silu_mul.choose(config.activation, device)
        turn_and_write, attention = kv_write.choose_with_rope(device), paged_attention.choose(device)
        self._norm, self._add_norm, self._gate = norm.run, add_norm.run, gate.run
        self._turn_and_write = turn_and_write.run
        self._prepare_attention = attention.run
        self.kernels = f"{attention.name}-2"  # changes whenever the arithmetic does
        self.can_be_captured = attention.name == "triton"  # in a CUDA graph: nothing in a forward asks the host
        self.choices = {
            "rms_norm": norm.reason,
            "rms_norm + residual": add_norm.reason,
            "silu_mul": gate.reason,
            "kv_write + rope": turn_and_write.reason,
            "paged_attention": attention.reason,
        }

    def attends(self, batch: Batch) -> Attends:
        """The batch's attention under each window of the model: all that a forward must ask the host for."""
        return {
            window: self._prepare_attention(batch.rows, self.device, window, batch.row_tensors)
            for window in self.config.windows
        }

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVStorage, attends: Attends | None = None) -> torch.Tensor:
        """Logits [len(batch.logit_places), vocab], fp32; writes the batch's keys and values into `kv`.

        `attends`: of this batch, where they are known already.
        """
        config, weights = self.config, self._weights
        attends = attends or self.attends(batch)
        turns = [table[batch.positions].unsqueeze(2).unbind(1) for table in self._rope_tables]  # (cos, sin) per kind
        hidden = torch.nn.functional.embedding(batch.token_ids, weights.embedding)
        if config.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        normed = self._norm(hidden, weights.layers[0].attention_norm, config.norm_eps)
        for index, layer in enumerate(weights.layers):
            kind = config.layers[index]
            pools = kv.layer(index)
            part = self._attention(layer, normed, batch, pools, attends[kind.window], turns[kind.rope])
            part = self._post_normed(part, layer.attention_post_norm)
            normed, hidden = self._add_norm(part, hidden, layer.mlp_norm, config.norm_eps)
            part = self._post_normed(layer.down(self._gate(layer.gate_up(normed))), layer.mlp_post_norm)
            if index + 1 < len(weights.layers):
                next_norm = weights.layers[index + 1].attention_norm
                normed, hidden = self._add_norm(part, hidden, next_norm, config.norm_eps)
        places = batch.logit_places
        wanted, _ = self._add_norm(part[places], hidden[places], weights.final_norm, config.norm_eps)
        logits = weights.head(wanted).float()
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        return logits

    def _attention(
        self,
        layer: LayerWeights,
        normed: torch.Tensor,
        batch: Batch,
        pools: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        turn: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]: this step's keys and values go to the pool first, then all are read."""
        config = self.config
        heads = layer.qkv(normed).view(len(normed), -1, config.head_dim)  # query heads, key heads, value heads
        (keys, values), (cos, sin) = pools, turn
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm(query, layer.query_norm, config.norm_eps)
            key = self._norm(key, layer.key_norm, config.norm_eps)
        query = self._turn_and_write(query, key, value, cos, sin, keys, values, batch.slots)
        attended = attend(query, keys, values, config.attention_scale, config.attention_softcap)
        return layer.attention_out(attended.flatten(1))

    def _post_normed(self, part: torch.Tensor, post_norm: torch.Tensor | None) -> torch.Tensor:
        return part if post_norm is None else self._norm(part, post_norm, self.config.norm_eps)
