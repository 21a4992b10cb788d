"""The rotation's table is the nearest float32 everywhere, whatever computed it and in whichever process."""

from __future__ import annotations

import math

import pytest
import torch

from engine.models.config import RopeConfig
from engine.models.rope import frequencies, rope_table


@pytest.mark.parametrize("length", [1, 40, 320, 8192])
def test_each_number_is_the_nearest_to_the_true_one(length: int) -> None:
    """torch's own, computed by several threads, were wrong by 1e-4 in some processes, and else in a last bit."""
    config = RopeConfig(kind="default", theta=100_000.0, rotary_dim=64, parameters={})
    table, (frequency, _) = rope_table(config, length), frequencies(config, length)
    assert table.shape == (length, 2, 32) and table.dtype == torch.float32
    for position in {0, 1, 17, length // 2, length - 1} & set(range(length)):
        angles = (torch.tensor(float(position)) * frequency).tolist()
        assert table[position, 0].tolist() == torch.tensor([math.cos(angle) for angle in angles]).tolist()
        assert table[position, 1].tolist() == torch.tensor([math.sin(angle) for angle in angles]).tolist()


def test_the_table_is_scaled_where_the_context_is_stretched() -> None:
    parameters = {"factor": 4.0, "original_max_position_embeddings": 64}
    config = RopeConfig(kind="yarn", theta=10_000.0, rotary_dim=16, parameters=parameters)
    scale = frequencies(config, 256)[1]
    assert scale > 1
    assert rope_table(config, 256)[0, 0].tolist() == pytest.approx([scale] * 8)
