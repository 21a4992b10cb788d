"""Block copy and block swap in Triton's interpreter: every bit arrives, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from kernels.block_copy import reference as block_copy_reference
from kernels.kv_swap import reference as kv_swap_reference
from tests.kernels.interpreted import KERNELS, poisoned

__all__ = ["poisoned"]

block_copy, kv_swap = KERNELS["block_copy"], KERNELS["kv_swap"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
BLOCKS = [(8, 1, 4), (16, 3, 10), (32, 2, 128)]  # block size, kv heads, head dim; the last in more than one chunk


def bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits, NaN of every kind among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return drawn.view(dtype)


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("moves", [[], [(0, 5)], [(3, 0), (3, 1), (6, 2)]])
def test_copies(moves: list[tuple[int, int]], block: tuple[int, int, int], dtype: torch.dtype) -> None:
    pool = bits(3, 2, 7, *block, dtype=dtype)
    expected = pool.clone()
    sources, targets = torch.tensor(moves, dtype=torch.int64).reshape(-1, 2).unbind(1)
    block_copy_reference.copy_blocks(expected, sources, targets)
    block_copy.copy_blocks(pool, sources.contiguous(), targets.contiguous())
    assert equal(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("blocks", "slots"), [([], []), ([4], [2]), ([6, 0, 3], [1, 0, 3])])
def test_out_and_back(blocks: list[int], slots: list[int], block: tuple[int, int, int], dtype: torch.dtype) -> None:
    pool, host = bits(3, 2, 7, *block, dtype=dtype), bits(4, 3, 2, *block, dtype=dtype, seed=1)
    expected_host, ids = host.clone(), torch.tensor(blocks, dtype=torch.int64)
    kv_swap_reference.swap_out(pool, ids, expected_host, slots)
    kv_swap.swap_out(pool, ids, host, slots)
    assert equal(host, expected_host)
    elsewhere = torch.tensor([(place + 1) % 7 for place in blocks], dtype=torch.int64)
    expected = pool.clone()
    kv_swap_reference.swap_in(host, slots, expected, elsewhere)
    kv_swap.swap_in(host, slots, pool, elsewhere)
    assert equal(pool, expected)
    assert all(equal(pool[:, :, there], host[slot]) for there, slot in zip(elsewhere.tolist(), slots, strict=True))


def test_a_pool_that_is_not_contiguous_is_refused() -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="contiguous"):
        block_copy.copy_blocks(torch.zeros(2, 2, 4, 8, 1, 4).transpose(3, 5), ids, ids)
