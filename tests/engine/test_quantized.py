"""Matrices in 8 and 4 bits: the decoder computes what it would with the matrices that the bits stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.batch import build_batch
from engine.config import EngineConfig
from engine.errors import InvalidConfig, ModelLoadError
from engine.kv_storage import KVStorage
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.families import decoder_config
from engine.models.quantized import Bits, QuantizedLinear, quantize
from engine.models.weights import DecoderWeights, load_weights
from engine.params import SamplingParams
from engine.plan import Row
from engine.runner import load_runner
from engine.sequence import Request, Sequence
from engine.weights.safetensors import Checkpoint
from kernels.quant_matmul.weights import dequantize
from tests.models import make_tiny_model

CPU = torch.device("cpu")


def load(folder: Path) -> tuple[DecoderConfig, DecoderWeights]:
    config = decoder_config(json.loads((folder / "config.json").read_text()))
    return config, load_weights(Checkpoint(folder), config, torch.float32, CPU)


def logits_of(config: DecoderConfig, weights: DecoderWeights) -> torch.Tensor:
    tokens = list(range(5, 25))
    sequence = Sequence(Request("r", tokens, SamplingParams(), seed=0), 0, 0)
    row = Row(sequence, 0, tokens, [1, 0], len(tokens), [sequence])
    kv = KVStorage(config, 16, 2, 0, torch.float32, CPU)
    return Decoder(config, weights, 64, CPU).forward(build_batch([row], 16, CPU), kv)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second with biases and a tied head
def test_logits_are_those_of_the_matrices_that_the_bits_stand_for(bits: Bits, family: str, tmp_path: Path) -> None:
    config, weights = load(make_tiny_model(tmp_path / family, family))
    exact = logits_of(config, weights)
    embedding = weights.embedding.clone()
    quantize(weights, bits, is_invariant=True)
    found = logits_of(config, weights)
    for layer in weights.layers:
        for name in ("qkv", "attention_out", "gate_up", "down"):
            linear = getattr(layer, name)
            assert isinstance(linear, QuantizedLinear) and linear.weight.dtype in (torch.int8, torch.uint8)
            linear.multiply = lambda x, weight: x @ dequantize(weight).T
    assert isinstance(weights.head, QuantizedLinear)
    torch.testing.assert_close(found, logits_of(config, weights), atol=1e-4, rtol=1e-4)
    assert torch.equal(weights.embedding, embedding)
    error = float((found - exact).abs().mean() / exact.abs().mean())
    assert (0.0 < error < 0.03) if bits == "int8" else (0.01 < error < 0.5)


def test_int4_is_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="GPUs alone") as caught:
        load_runner(str(make_tiny_model(tmp_path / "tiny")), EngineConfig(device="cpu", dtype="int4"))
    assert caught.value.param == "dtype"


def test_a_matrix_that_no_group_divides_is_refused(tmp_path: Path) -> None:
    _, weights = load(make_tiny_model(tmp_path / "odd", overrides={"intermediate_size": 48}))
    with pytest.raises(ModelLoadError, match="48 inputs"):
        quantize(weights, "int4", is_invariant=True)
