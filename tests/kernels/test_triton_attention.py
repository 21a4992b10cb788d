"""Paged attention in Triton's interpreter, against the reference over ragged rows and poisoned pools."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention.reference import paged_attention
from kernels.paged_attention.rows import PagedRows
from tests.kernels.interpreted import KERNELS, exact_dot, poisoned
from tests.kernels.test_paged_attention import MODES, SHAPES, Case, make_case

__all__ = ["exact_dot", "poisoned"]

CPU = torch.device("cpu")
TritonAttention = KERNELS["paged_attention"].TritonAttention
SPLIT_LEN = KERNELS["paged_attention"].SPLIT_LEN


def attend(
    case: Case, scale: float, window: int | None = None, softcap: float | None = None, is_invariant: bool = False
) -> torch.Tensor:
    attention = TritonAttention(case.rows, CPU, window, is_invariant=is_invariant)
    found: torch.Tensor = attention(case.query, case.key_pool, case.value_pool, scale, softcap)
    return found


def assert_near_reference(
    found: torch.Tensor, case: Case, scale: float, window: int | None = None, softcap: float | None = None
) -> None:
    expected = paged_attention(case.query, case.key_pool, case.value_pool, case.rows, scale, window, softcap)
    assert found.dtype == expected.dtype
    tolerance = 2e-6 if found.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=4 * tolerance)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_ragged_rows(shapes: list[tuple[int, int]]) -> None:
    case = make_case(shapes, block_size=16, heads=3, kv_heads=1, head_dim=24)
    assert_near_reference(attend(case, 0.3), case, 0.3)
    assert_near_reference(attend(case, 0.3, 9, 3.0), case, 0.3, 9, 3.0)


@pytest.mark.parametrize(("window", "softcap"), MODES)
def test_windows_and_softcaps(window: int | None, softcap: float | None) -> None:
    case = make_case([(1, 20), (7, 7), (1, 50), (1, 1), (19, 64)], block_size=16, heads=6, kv_heads=2, head_dim=24)
    assert_near_reference(attend(case, 0.3, window, softcap), case, 0.3, window, softcap)


@pytest.mark.parametrize("window", [None, 70, 300])
def test_rows_longer_than_a_split(window: int | None) -> None:
    shapes = [(1, 2 * SPLIT_LEN + 5), (3, SPLIT_LEN), (1, SPLIT_LEN + 1), (20, SPLIT_LEN + 20)]
    case = make_case(shapes, block_size=32, heads=2, kv_heads=1, head_dim=16)
    assert_near_reference(attend(case, 0.25, window), case, 0.25, window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(1, 1, 4, 8), (9, 3, 64, 64), (2, 2, 128, 32), (20, 1, 10, 8)],
)
def test_head_counts_and_block_sizes(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    case = make_case([(1, 65), (20, 40), (1, 8)], block_size, heads, kv_heads, head_dim)
    assert_near_reference(attend(case, 0.2), case, 0.2)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, 3.0)])
def test_half_precision(window: int | None, softcap: float | None) -> None:
    case = half(make_case([(1, 300), (33, 70), (5, 5), (1, 31)], 16, 4, 2, 16))
    assert_near_reference(attend(case, 0.25, window, softcap), case, 0.25, window, softcap)


def test_heads_of_a_packed_query() -> None:
    case = make_case([(1, 30), (20, 33)], 16, 4, 2, 16)
    packed = torch.full((21, 7, 16), torch.nan)
    packed[:, 2:6] = case.query
    case.query = packed[:, 2:6]
    assert_near_reference(attend(case, 0.25), case, 0.25)


def test_no_rows_and_rows_without_queries() -> None:
    empty = Case(PagedRows([0], [], [], 16), torch.zeros(0, 4, 16), *torch.zeros(2, 1, 16, 2, 16))
    assert attend(empty, 0.25).shape == (0, 4, 16)
    case = make_case([(1, 30), (0, 20), (2, 9)], 16, 4, 2, 16)
    assert_near_reference(attend(case, 0.25), case, 0.25)


@pytest.mark.usefixtures("exact_dot")
def test_another_row_s_nan_stays_its_own() -> None:
    case = make_case([(1, 30), (1, 33), (20, 20), (1, 40)], 16, 4, 2, 16)
    clean = attend(case, 0.25)
    for pool in (case.key_pool, case.value_pool):
        pool[case.rows.block_tables[1]] = torch.nan
    found = attend(case, 0.25)
    assert found[1].isnan().all()
    others = [0, *range(2, 23)]
    assert torch.equal(found[others], clean[others])


def test_blocks_behind_the_window_may_belong_to_another() -> None:
    case = make_case([(1, 100), (20, 90)], 8, 4, 2, 16)
    clean = attend(case, 0.25, window=9)
    for pool in (case.key_pool, case.value_pool):
        pool[case.rows.block_tables[0][:11]] = torch.nan  # sees 91 .. 99, in blocks 11 and 12
        pool[case.rows.block_tables[1][:7]] = torch.nan  # sees 62 .. 89, in blocks 7 and on
    assert torch.equal(attend(case, 0.25, window=9), clean)


@pytest.mark.usefixtures("exact_dot")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_s_bits_do_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    shapes = [(1, 290), (5, 40), (1, 17), (20, 64), (1, 1)]
    case = make_case(shapes, 16, 3, 1, 16)
    case = case if dtype == torch.float32 else half(case)
    together = attend(case, 0.25)
    for row in range(len(shapes)):
        assert torch.equal(attend(alone(case, row), 0.25), together[queries(case.rows, row)])


@pytest.mark.usefixtures("exact_dot")
def test_decode_chunk_and_verification_agree_bit_for_bit_where_invariant() -> None:
    num_tokens = 48
    case = make_case([(num_tokens, num_tokens)], 16, 4, 2, 16)
    whole = attend(case, 0.25, is_invariant=True)
    for start, end in [(0, 48), (47, 48), (20, 21), (40, 46), (16, 48)]:
        tables, part = case.rows.block_tables, case.query[start:end]
        rows = PagedRows([0, end - start], [end], tables, 16)
        found = attend(Case(rows, part, case.key_pool, case.value_pool), 0.25, is_invariant=True)
        assert torch.equal(found, whole[start:end])


@pytest.mark.usefixtures("exact_dot")
def test_block_size_changes_no_bit() -> None:
    cases = [make_case([(1, 90), (40, 70)], block_size, 4, 2, 16) for block_size in (8, 32)]
    assert torch.equal(cases[0].query, cases[1].query)
    assert torch.equal(attend(cases[0], 0.25), attend(cases[1], 0.25))


def test_dtypes_that_differ_are_refused() -> None:
    case = make_case([(1, 30)], 16, 4, 2, 16)
    case.query = case.query.half()
    with pytest.raises(ValueError, match="float16"):
        attend(case, 0.25)


def half(case: Case) -> Case:
    return Case(case.rows, case.query.half(), case.key_pool.half(), case.value_pool.half())


def queries(rows: PagedRows, row: int) -> slice:
    return slice(rows.query_starts[row], rows.query_starts[row + 1])


def alone(case: Case, row: int) -> Case:
    rows = case.rows
    only = PagedRows([0, rows.num_queries(row)], [rows.context_lens[row]], [rows.block_tables[row]], rows.block_size)
    return Case(only, case.query[queries(rows, row)], case.key_pool, case.value_pool)
