"""RMS norm, rope, the gate and the KV write in Triton's interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_write import reference as kv_write_reference
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rope import reference as rope_reference
from kernels.silu_mul import reference as silu_mul_reference
from tests.kernels.interpreted import DTYPES, FLOAT16, FLOAT32, KERNELS, TOLERANCE, poisoned, values

__all__ = ["poisoned"]

rms_norm, rope, kv_write, silu_mul = (KERNELS[op] for op in ("rms_norm", "rope", "kv_write", "silu_mul"))


def assert_near(found: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    assert found.dtype == expected.dtype
    tolerance = factor * TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (0, 8), (7, 33), (3, 5, 16), (5, 1), (37, 64), (2, 8192)])
def test_rms_norm(shape: tuple[int, ...], kind: str) -> None:
    x, weight = values(*shape, kind=kind), values(shape[-1], seed=1)
    assert_near(rms_norm.rms_norm(x, weight, 1e-5), rms_norm_reference.rms_norm(x, weight, 1e-5), factor=4)


@pytest.mark.parametrize("kind", DTYPES)
def test_rms_norm_of_some_heads_of_a_packed_tensor(kind: str) -> None:
    packed, weight = values(5, 7, 24, kind=kind), values(24, seed=1)
    heads = packed[:, 2:5]
    assert_near(rms_norm.rms_norm(heads, weight, 1e-6), rms_norm_reference.rms_norm(heads, weight, 1e-6), factor=4)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (0, 8), (7, 33), (3, 100)])
def test_rms_norm_of_a_sum(shape: tuple[int, ...], kind: str) -> None:
    x, residual, weight = values(*shape, kind=kind), values(*shape, kind=kind, seed=2), values(shape[-1], seed=1)
    normed, total = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_total = rms_norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert torch.equal(normed, rms_norm.rms_norm(total, weight, 1e-5))  # the rounded sum is what is normed
    assert_near(normed, expected_normed, factor=4)


def test_a_row_s_norm_does_not_depend_on_its_batch() -> None:
    x, weight = values(37, 64), values(64, seed=1)
    together = rms_norm.rms_norm(x, weight, 1e-5)
    assert all(torch.equal(rms_norm.rms_norm(x[i : i + 1], weight, 1e-5)[0], together[i]) for i in range(37))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(1, 4, 2), (9, 16, 16), (3, 24, 8), (32, 128, 128)])
def test_rope(heads: int, head_dim: int, rotary_dim: int, kind: str) -> None:
    x = values(3, heads + 2, head_dim, kind=kind)[:, 1 : heads + 1]  # some heads of a packed tensor
    angle = values(3, 2, rotary_dim // 2, seed=1) * 9
    cos, sin = angle.cos()[:, :1], angle.sin()[:, 1:]
    assert_near(rope.apply_rope(x, cos, sin), rope_reference.apply_rope(x, cos, sin), factor=2)


def test_rope_of_no_tokens() -> None:
    angle = torch.zeros(0, 1, 8)
    assert rope.apply_rope(torch.zeros(0, 3, 16), angle, angle).shape == (0, 3, 16)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("activation", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (6, 17), (0, 8), (3, 1024)])
def test_the_gate(tokens: int, size: int, activation: str, kind: str) -> None:
    gate_up = values(tokens, 2 * size, kind=kind) * 3
    expected = getattr(silu_mul_reference, activation)(gate_up)
    assert_near(getattr(silu_mul, activation)(gate_up), expected, factor=4)


def test_the_gate_survives_extremes() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]])
    assert torch.equal(silu_mul.silu_mul(gate_up), torch.tensor([[-0.0, 3e4]]))
    assert torch.equal(silu_mul.gelu_mul(gate_up), torch.tensor([[-0.0, 3e4]]))


@pytest.mark.parametrize(("kind", "pool_kind"), [(FLOAT32, FLOAT32), (FLOAT16, FLOAT16), (FLOAT32, FLOAT16)])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 8), (1, 10), (11, 64)])
def test_kv_write_fills_its_slots_and_no_other(kv_heads: int, head_dim: int, kind: str, pool_kind: str) -> None:
    pools = torch.full((2, 6, 4, kv_heads, head_dim), torch.nan, dtype=getattr(torch, pool_kind))
    expected = pools.clone()
    slots = torch.tensor([13, 2, 23, 0])
    packed = values(4, 3 * kv_heads, head_dim, kind=kind)
    key, value = packed[:, :kv_heads], packed[:, 2 * kv_heads :]
    kv_write.write_kv(key, value, pools[0], pools[1], slots)
    kv_write_reference.write_kv(key, value, expected[0], expected[1], slots)
    assert torch.equal(pools.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert int(pools.isnan().sum()) == 2 * 20 * kv_heads * head_dim


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(9, 3, 64, 64), (4, 4, 10, 4), (17, 1, 16, 16)]
)
def test_turned_keys_are_written(heads: int, kv_heads: int, head_dim: int, rotary_dim: int, kind: str) -> None:
    packed = values(5, heads + 2 * kv_heads, head_dim, kind=kind)
    query, key, value = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
    angle = values(5, 1, rotary_dim // 2, seed=1) * 9
    slots = torch.tensor([7, 40, 8, 3, 22])
    pools = torch.full((2, 3, 16, kv_heads, head_dim), torch.nan, dtype=packed.dtype)
    expected_pools = pools.clone()
    cos, sin = angle.cos(), angle.sin()
    found = kv_write.turn_and_write_kv(query, key, value, cos, sin, pools[0], pools[1], slots)
    expected = kv_write_reference.turn_and_write_kv(
        query, key, value, cos, sin, expected_pools[0], expected_pools[1], slots
    )
    assert_near(found, expected, factor=2)
    assert torch.equal(pools.isnan(), expected_pools.isnan())
    assert_near(pools.nan_to_num(), expected_pools.nan_to_num(), factor=2)


def test_no_tokens_write_nothing() -> None:
    pools = torch.full((2, 2, 4, 1, 8), torch.nan)
    nothing, angle = torch.zeros(0, 1, 8), torch.zeros(0, 1, 4)
    slots = torch.zeros(0, dtype=torch.int64)
    kv_write.write_kv(nothing, nothing, pools[0], pools[1], slots)
    assert kv_write.turn_and_write_kv(nothing, nothing, nothing, angle, angle, pools[0], pools[1], slots).shape == (
        0,
        1,
        8,
    )
    assert pools.isnan().all()


def test_layouts_that_the_kernels_cannot_read_are_refused() -> None:
    crossed = torch.zeros(4, 8, 2).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm.rms_norm(crossed, torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        rope.apply_rope(crossed, torch.zeros(4, 1, 4), torch.zeros(4, 1, 4))
    with pytest.raises(ValueError, match="contiguous"):
        kv_write.write_kv(crossed, crossed, *torch.zeros(2, 1, 4, 2, 8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="contiguous"):
        silu_mul.silu_mul(torch.zeros(8, 4).T)
