"""A whole model over the Triton kernels, interpreted: the logits of the torch path, for prompts, chunks and decodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

from engine.batch import build_batch
from engine.kv_storage import KVStorage
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.families import decoder_config
from engine.models.weights import DecoderWeights, load_weights
from engine.params import SamplingParams
from engine.plan import Row
from engine.sequence import Request, Sequence
from engine.weights.safetensors import Checkpoint
from kernels.choice import Choice
from tests.kernels.interpreted import poisoned
from tests.models import make_tiny_model

__all__ = ["poisoned"]

CPU = torch.device("cpu")
DECODER_OPS = ["kv_write", "paged_attention", "rms_norm", "silu_mul"]


def load(folder: Path) -> tuple[DecoderConfig, DecoderWeights]:
    config = decoder_config(json.loads((folder / "config.json").read_text()))
    return config, load_weights(Checkpoint(folder), config, torch.float32, CPU)


def as_on_a_gpu(
    device_type: str, load: Callable[[], object], otherwise: object, name: str = "reference"
) -> Choice[object]:
    return Choice("triton", "triton: as on a GPU", load())


def row(start: int, token_ids: list[int], table: list[int]) -> Row:
    request = Request("r", token_ids, SamplingParams(), seed=0)
    return Row(Sequence(request, choice=0, seed=0), start, token_ids, table, num_logits=len(token_ids))


STEPS = [
    [row(0, list(range(5, 42)), [4, 1, 3]), row(0, [9, 8, 7], [7])],
    [row(37, [11], [4, 1, 3]), row(3, list(range(100, 120)), [7, 0]), row(0, [3], [2])],
]


def run(decoder: Decoder) -> list[torch.Tensor]:
    kv = KVStorage(decoder.config, 16, 8, 0, torch.float32, CPU)
    return [decoder.forward(build_batch(rows, 16, CPU), kv) for rows in STEPS]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])  # plain; norms of heads; softcap, windows, GELU
def test_logits_are_those_of_the_torch_path(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = load(make_tiny_model(tmp_path / family, family))
    expected = run(Decoder(config, weights, 64, CPU))
    for op in DECODER_OPS:
        monkeypatch.setattr(import_module(f"kernels.{op}.dispatch"), "triton_on_gpu", as_on_a_gpu)
    decoder = Decoder(config, weights, 64, CPU)
    assert set(decoder.choices.values()) == {"triton: as on a GPU"}
    for found, wanted in zip(run(decoder), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
