"""Blocks move whole, in the plan's order, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kv_storage import KVStorage, block_bytes
from engine.models.config import DecoderConfig
from engine.models.families import decoder_config
from engine.plan import BlockMove, Plan
from tests.models import _BASE

CPU = torch.device("cpu")


@pytest.fixture
def config() -> DecoderConfig:
    return decoder_config({"model_type": "llama", **_BASE})


@pytest.fixture
def storage(config: DecoderConfig) -> KVStorage:
    """8 blocks and 4 host slots; block b holds values around b."""
    made = KVStorage(config, 16, 8, 4, torch.float32, CPU)
    noise = torch.rand(made.pool.shape, generator=torch.Generator().manual_seed(0)) / 10
    made.pool.copy_(noise + torch.arange(8).view(1, 1, 8, 1, 1, 1))
    return made


def contents(storage: KVStorage, block: int) -> torch.Tensor:
    return storage.pool[:, :, block].clone()


def moves(*pairs: tuple[int, int]) -> list[BlockMove]:
    return [BlockMove(*pair) for pair in pairs]


def plan(**lists: Any) -> Plan:
    return Plan(0, **lists)


def test_layers_are_views_of_the_pool(storage: KVStorage) -> None:
    key, value = storage.layer(1)
    assert key.shape == value.shape == (8, 16, 2, 16)
    value[3, 5, 1, 7] = 42.0
    assert storage.pool[1, 1, 3, 5, 1, 7] == 42.0


def test_a_swapped_block_comes_back_bit_for_bit_elsewhere(storage: KVStorage) -> None:
    before = contents(storage, 2), contents(storage, 5)
    storage.apply(plan(swap_out=moves((2, 3), (5, 0))))
    storage.pool[:, :, [2, 5]] = torch.nan
    storage.apply(plan(swap_in=moves((3, 7), (0, 1))))
    assert torch.equal(contents(storage, 7), before[0])
    assert torch.equal(contents(storage, 1), before[1])


def test_one_plan_swaps_out_before_it_swaps_in_before_it_copies(storage: KVStorage) -> None:
    storage.apply(plan(swap_out=moves((6, 1))))
    two, six = contents(storage, 2), contents(storage, 6)
    storage.apply(plan(swap_out=moves((2, 0)), swap_in=moves((1, 2)), copies=moves((2, 4))))
    assert torch.equal(contents(storage, 2), six)  # filled by swap-in after it was saved
    assert torch.equal(contents(storage, 4), six)  # copied after it was filled
    storage.apply(plan(swap_in=moves((0, 5))))
    assert torch.equal(contents(storage, 5), two)


def test_a_copy_leaves_its_source_and_its_neighbours(storage: KVStorage) -> None:
    before = [contents(storage, block) for block in range(8)]
    storage.apply(plan(copies=moves((1, 4), (1, 6))))
    for block in range(8):
        assert torch.equal(contents(storage, block), before[1 if block in (4, 6) else block])


@pytest.mark.parametrize(
    "lists",
    [
        {"swap_out": moves((8, 0))},
        {"swap_out": moves((0, 0), (1, 4))},
        {"swap_in": moves((4, 0))},
        {"swap_in": moves((0, 8))},
        {"copies": moves((-1, 2))},
        {"copies": moves((1, 2), (2, 8))},
    ],
)
def test_a_move_out_of_range_is_refused_and_moves_nothing(storage: KVStorage, lists: dict[str, Any]) -> None:
    pool, host = storage.pool.clone(), storage.host.clone()
    with pytest.raises(IndexError, match="outside"):
        storage.apply(plan(**lists))
    assert torch.equal(storage.pool, pool)
    assert torch.equal(storage.host, host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_bytes_are_what_a_block_takes(config: DecoderConfig, dtype: torch.dtype) -> None:
    storage = KVStorage(config, 32, 4, 2, dtype, CPU)
    assert storage.pool.numel() * storage.pool.itemsize == 4 * block_bytes(config, 32, dtype)
    assert storage.host.numel() * storage.host.itemsize == 2 * block_bytes(config, 32, dtype)
