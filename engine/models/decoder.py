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
from kernels.rope import dispatch as rope
from kernels.silu_mul import dispatch as silu_mul


class Decoder:
    """Weights and the chosen kernels. `choices` says for each op what runs and why."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, max_model_len: int, device: torch.device
    ) -> None:
        self.config = config
        self.device = device
        self.kernels = "triton-1" if device.type == "cuda" else "torch-1"  # changes whenever the arithmetic does
        self._weights = weights
        self._rope_tables = [rope_table(kind, max_model_len).to(device) for kind in config.ropes]
        norm, turn, gate = rms_norm.choose(device), rope.choose(device), silu_mul.choose(config.activation, device)
        write, attention = kv_write.choose(device), paged_attention.choose(device)
        self._norm, self._turn, self._gate, self._write_kv = norm.run, turn.run, gate.run, write.run
        self._prepare_attention = attention.run
        self.choices = {
            "rms_norm": norm.reason,
            "rope": turn.reason,
            "silu_mul": gate.reason,
            "kv_write": write.reason,
            "paged_attention": attention.reason,
        }

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """Logits [len(batch.logit_places), vocab], fp32; writes the batch's keys and values into `kv`."""
        config, weights = self.config, self._weights
        attends = {window: self._prepare_attention(batch.rows, self.device, window) for window in config.windows}
        turns = [table[batch.positions].unsqueeze(2).unbind(1) for table in self._rope_tables]  # (cos, sin) per kind
        hidden = torch.nn.functional.embedding(batch.token_ids, weights.embedding)
        if config.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(config.embedding_scale, dtype=hidden.dtype)
        for index, layer in enumerate(weights.layers):
            kind = config.layers[index]
            pools = kv.layer(index)
            attended = self._attention(layer, hidden, batch, pools, attends[kind.window], turns[kind.rope])
            hidden = self._add(hidden, attended, layer.attention_post_norm)
            normed = self._norm(hidden, layer.mlp_norm, config.norm_eps)
            hidden = self._add(hidden, layer.down(self._gate(layer.gate_up(normed))), layer.mlp_post_norm)
        wanted = self._norm(hidden[batch.logit_places], weights.final_norm, config.norm_eps)
        logits = weights.head(wanted).float()
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        return logits

    def _attention(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        batch: Batch,
        pools: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        turn: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]: this step's keys and values go to the pool first, then all are read."""
        config = self.config
        normed = self._norm(hidden, layer.attention_norm, config.norm_eps)
        heads = layer.qkv(normed).view(len(hidden), -1, config.head_dim)  # query heads, key heads, value heads
        num_turned = config.num_heads + config.num_kv_heads
        turned, value = heads[:, :num_turned], heads[:, num_turned:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm(turned[:, : config.num_heads], layer.query_norm, config.norm_eps)
            key = self._norm(turned[:, config.num_heads :], layer.key_norm, config.norm_eps)
            turned = torch.cat((query, key), dim=1)
        turned = self._turn(turned, *turn)
        self._write_kv(turned[:, config.num_heads :], value, *pools, batch.slots)
        attended = attend(turned[:, : config.num_heads], *pools, config.attention_scale, config.attention_softcap)
        return layer.attention_out(attended.flatten(1))

    def _add(self, hidden: torch.Tensor, part: torch.Tensor, post_norm: torch.Tensor | None) -> torch.Tensor:
        return hidden + (part if post_norm is None else self._norm(part, post_norm, self.config.norm_eps))
