"""A decoder with the shape of a Llama-8B and random weights, made on the device: nothing is downloaded."""

from __future__ import annotations

import torch

from bench.gpu.machine import Machine
from engine.models.config import DecoderConfig, LayerConfig, RopeConfig
from engine.models.decoder import Decoder
from engine.models.linear import Linear
from engine.models.weights import DecoderWeights, LayerWeights
from kernels.calls import Shape

_SPREAD = 0.02
_SHARE_OF_MEMORY = 0.6  # for weights; where the whole model is larger, it gets fewer layers


def decoder(machine: Machine, shape: Shape, num_layers: int, max_model_len: int) -> tuple[Decoder, DecoderWeights]:
    config = DecoderConfig(
        family="llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position=max_model_len,
        norm_eps=1e-5,
        activation="silu",
        ropes=(RopeConfig("default", 500_000.0, shape.head_dim, {}),),
        layers=(LayerConfig(None, 0),) * num_layers,
        is_tied=False,
        attention_scale=shape.head_dim**-0.5,
    )
    weights = DecoderWeights(
        embedding=_random(machine, shape, shape.vocab, shape.hidden),
        layers=[_layer(machine, shape) for _ in range(num_layers)],
        final_norm=_ones(machine, shape.hidden),
        head=_linear(machine, shape, shape.vocab, shape.hidden),
    )
    return Decoder(config, weights, max_model_len, machine.torch_device), weights


def num_layers_that_fit(machine: Machine, shape: Shape, wanted: int) -> int:
    if machine.is_dry:
        return wanted
    total = torch.cuda.get_device_properties(machine.torch_device).total_memory
    rest = 2 * shape.vocab * shape.hidden * shape.dtype.itemsize
    return max(1, min(wanted, int((total * _SHARE_OF_MEMORY - rest) / (layer_weights(shape) * shape.dtype.itemsize))))


def layer_weights(shape: Shape) -> int:
    """How many numbers one layer has."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden * (2 * query + 2 * kv + 3 * shape.mlp)


def _layer(machine: Machine, shape: Shape) -> LayerWeights:
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return LayerWeights(
        attention_norm=_ones(machine, shape.hidden),
        qkv=_linear(machine, shape, query + 2 * kv, shape.hidden),
        query_norm=None,
        key_norm=None,
        attention_out=_linear(machine, shape, shape.hidden, query),
        attention_post_norm=None,
        mlp_norm=_ones(machine, shape.hidden),
        gate_up=_linear(machine, shape, 2 * shape.mlp, shape.hidden),
        down=_linear(machine, shape, shape.hidden, shape.mlp),
        mlp_post_norm=None,
    )


def _linear(machine: Machine, shape: Shape, outputs: int, inputs: int) -> Linear:
    return Linear(_random(machine, shape, outputs, inputs), None)


def _random(machine: Machine, shape: Shape, *size: int) -> torch.Tensor:
    return torch.empty(size, dtype=shape.dtype, device=machine.torch_device).normal_(0, _SPREAD)


def _ones(machine: Machine, size: int) -> torch.Tensor:
    return torch.ones(size, device=machine.torch_device)
