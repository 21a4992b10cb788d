"""Gathered attention against the reference over ragged shapes, and the reference against its formula in fp64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from kernels.paged_attention.dispatch import choose
from kernels.paged_attention.gathered import GatheredAttention
from kernels.paged_attention.reference import paged_attention
from kernels.paged_attention.rows import PagedRows

CPU = torch.device("cpu")
NUM_BLOCKS = 96


@dataclass
class Case:
    """Rows written as (queries, context), over a pool whose unused slots are NaN."""

    rows: PagedRows
    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor


def make_case(
    shapes: list[tuple[int, int]], block_size: int, heads: int, kv_heads: int, head_dim: int, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    deck = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    pools = torch.full((2, NUM_BLOCKS, block_size, kv_heads, head_dim), torch.nan)
    tables = []
    for _, context_len in shapes:
        table = [deck.pop() for _ in range(math.ceil(context_len / block_size))]
        for position in range(context_len):
            block, offset = table[position // block_size], position % block_size
            pools[:, block, offset] = torch.randn((2, kv_heads, head_dim), generator=generator)
        tables.append(table)
    starts = [0]
    for num_queries, _ in shapes:
        starts.append(starts[-1] + num_queries)
    rows = PagedRows(starts, [context_len for _, context_len in shapes], tables, block_size)
    query = torch.randn((starts[-1], heads, head_dim), generator=generator)
    return Case(rows, query, pools[0], pools[1])


def formula(case: Case, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
    """One query, one head, one key at a time, in fp64."""
    rows, output = case.rows, torch.zeros(case.query.shape, dtype=torch.float64)
    group_size = case.query.shape[1] // case.key_pool.shape[2]
    for row in range(len(rows)):
        for place in range(rows.num_queries(row)):
            position = rows.context_lens[row] - rows.num_queries(row) + place
            seen = [p for p in range(position + 1) if window is None or p > position - window]
            slots = [(rows.block_tables[row][p // rows.block_size], p % rows.block_size) for p in seen]
            for head in range(case.query.shape[1]):
                query = case.query[rows.query_starts[row] + place, head].double()
                keys = torch.stack([case.key_pool[b, o, head // group_size].double() for b, o in slots])
                values = torch.stack([case.value_pool[b, o, head // group_size].double() for b, o in slots])
                score = scale * (keys @ query)
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                output[rows.query_starts[row] + place, head] = score.softmax(-1) @ values
    return output


SHAPES = {
    "one token": [(1, 1)],
    "one decode": [(1, 37)],
    "one prefill": [(19, 19)],
    "chunk": [(5, 41)],
    "block borders": [(16, 16), (1, 16), (1, 17), (17, 33), (1, 32)],
    "decodes of many lengths": [(1, n) for n in (1, 2, 130, 131, 200, 33, 16, 250)],
    "mixed": [(1, 20), (7, 7), (1, 150), (3, 40), (1, 1), (30, 64)],
}
MODES = [(None, None), (9, None), (None, 3.0), (9, 3.0), (1, None), (500, 3.0)]


@pytest.mark.parametrize(("window", "softcap"), MODES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_gathered_equals_the_reference(
    shapes: list[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    case = make_case(shapes, block_size=16, heads=6, kv_heads=2, head_dim=24)
    expected = paged_attention(case.query, case.key_pool, case.value_pool, case.rows, 0.3, window, softcap)
    attend = GatheredAttention(case.rows, CPU, window)
    torch.testing.assert_close(
        attend(case.query, case.key_pool, case.value_pool, 0.3, softcap), expected, atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize(("window", "softcap"), MODES)
def test_the_reference_is_its_formula(window: int | None, softcap: float | None) -> None:
    case = make_case([(1, 20), (7, 7), (3, 40), (1, 1)], block_size=8, heads=4, kv_heads=2, head_dim=8)
    found = paged_attention(case.query, case.key_pool, case.value_pool, case.rows, 0.4, window, softcap)
    torch.testing.assert_close(found.double(), formula(case, 0.4, window, softcap), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 4), (9, 3, 64), (8, 8, 16), (7, 1, 10)])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_head_counts_and_block_sizes(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    case = make_case([(1, 65), (33, 40), (1, 8)], block_size, heads, kv_heads, head_dim)
    expected = paged_attention(case.query, case.key_pool, case.value_pool, case.rows, 0.2)
    found = GatheredAttention(case.rows, CPU, None)(case.query, case.key_pool, case.value_pool, 0.2)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_half_precision_pools_stay_near_the_reference() -> None:
    case = make_case([(1, 65), (33, 40)], 16, 4, 2, 16)
    pools = case.key_pool.bfloat16(), case.value_pool.bfloat16()
    query = case.query.bfloat16()
    expected = paged_attention(query, *pools, case.rows, 0.25)
    found = GatheredAttention(case.rows, CPU, None)(query, *pools, 0.25)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_another_row_s_nan_stays_its_own() -> None:
    case = make_case([(1, 30), (1, 33), (4, 20)], 16, 4, 2, 16)
    clean = GatheredAttention(case.rows, CPU, None)(case.query, case.key_pool, case.value_pool, 0.25)
    case.key_pool[case.rows.block_tables[1]] = torch.nan
    case.value_pool[case.rows.block_tables[1]] = torch.nan
    found = GatheredAttention(case.rows, CPU, None)(case.query, case.key_pool, case.value_pool, 0.25)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3, 4, 5]], clean[[0, 2, 3, 4, 5]])


def test_the_dispatch_says_why() -> None:
    choice = choose(CPU)
    assert choice.name == "torch"
    assert "cpu" in choice.reason
