"""The capacity planner against numbers that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.models.config import DecoderConfig
from engine.models.families import decoder_config
from engine.planner import GIB, kv_bytes_per_token, num_parameters, parse_bytes, plan_capacity
from engine.weights.safetensors import Checkpoint
from tests.models import FAMILIES, make_tiny_model

QWEN = Path(__file__).parents[2] / "bench/models/qwen2.5-3b.json"


@pytest.fixture
def qwen() -> DecoderConfig:
    return decoder_config(json.loads(QWEN.read_text()))


def test_qwen_on_24_gb_holds_about_forty_dialogues_paged_and_twelve_contiguous(qwen: DecoderConfig) -> None:
    capacity = plan_capacity(qwen, gpu_memory_bytes=24 * 10**9, context_tokens=10_000)
    assert capacity.kv_bytes_per_token == 36_864
    assert 38 <= capacity.num_sequences_paged <= 42
    assert 11 <= capacity.num_sequences_contiguous <= 13
    assert capacity.kv_waste_paged < 0.04 < capacity.kv_waste_contiguous


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / family, family)
    checkpoint = Checkpoint(folder)
    stored = {
        name: checkpoint.read(name).numel()
        for name in checkpoint.names
        if not name.endswith(".bias") and "q_norm" not in name and "k_norm" not in name
    }
    assert num_parameters(decoder_config(json.loads((folder / "config.json").read_text()))) == sum(stored.values())


def test_every_byte_of_the_budget_is_accounted_for(qwen: DecoderConfig) -> None:
    capacity = plan_capacity(qwen, gpu_memory_bytes=24 * GIB, context_tokens=1000, gpu_memory_utilization=0.5)
    used = capacity.weight_bytes + capacity.activation_bytes + capacity.pool_bytes
    assert used == 12 * GIB
    per_block = capacity.block_size * kv_bytes_per_token(qwen, "float16")
    assert 0 <= capacity.pool_bytes - capacity.num_blocks * per_block < per_block


def test_smaller_kv_holds_more(qwen: DecoderConfig) -> None:
    half = plan_capacity(qwen, gpu_memory_bytes=24 * GIB, context_tokens=5000, kv_dtype="int8")
    whole = plan_capacity(qwen, gpu_memory_bytes=24 * GIB, context_tokens=5000)
    assert half.num_blocks in (2 * whole.num_blocks, 2 * whole.num_blocks + 1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"gpu_memory_bytes": 4 * GIB}, "gpu_memory"),
        ({"context_tokens": 0}, "context"),
        ({"context_tokens": 40_000}, "context"),
        ({"reserved_tokens": 10}, "reserved"),
        ({"dtype": "float13"}, "dtype"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
    ],
)
def test_what_cannot_be_is_refused_by_name(qwen: DecoderConfig, changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        plan_capacity(qwen, **{"gpu_memory_bytes": 24 * GIB, "context_tokens": 1000, **changes})  # type: ignore[arg-type]
    assert refusal.value.param == field


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("80 GB", 80 * 10**9),
        ("1.5gib", 3 * GIB // 2),
        ("1024", 1024),
        ("512M", None),
        ("-1GB", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(InvalidRequest, match="gpu"):
            parse_bytes(text, "gpu")
    else:
        assert parse_bytes(text, "gpu") == size
