"""RMS norm, rope, the gate and the KV write against their formulas in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.kv_write import dispatch as kv_write
from kernels.rms_norm import dispatch as rms_norm
from kernels.rope import dispatch as rope
from kernels.silu_mul import dispatch as silu_mul

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (0, 8), (7, 33), (3, 5, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = values(*shape, dtype=dtype), values(shape[-1], seed=1)
    wide = x.double()
    expected = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * weight.double()
    found = rms_norm.choose(CPU).run(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm.choose(CPU).run(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [2, 8, 16])
def test_rope_turns_pairs_and_passes_the_rest(rotary_dim: int, dtype: torch.dtype) -> None:
    x = values(5, 3, 16, dtype=dtype)
    angle = values(5, 1, rotary_dim // 2, seed=1)
    found = rope.choose(CPU).run(x, angle.cos(), angle.sin())
    half = rotary_dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
    turned = pairs * torch.exp(1j * angle.double())
    expected = torch.cat((turned.real, turned.imag, x[..., rotary_dim:].double()), dim=-1)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate(activation: silu_mul.Activation, dtype: torch.dtype) -> None:
    gate_up = values(6, 34, dtype=dtype) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    gated = gate / (1 + torch.exp(-gate)) if activation == "silu" else F.gelu(gate, approximate="tanh")
    found = silu_mul.choose(activation, CPU).run(gate_up)
    assert found.shape == (6, 17)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), gated * up, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_gate_survives_extremes() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]])
    assert torch.equal(silu_mul.choose("silu", CPU).run(gate_up), torch.tensor([[-0.0, 3e4]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_fills_its_slots_and_no_other(dtype: torch.dtype) -> None:
    key_pool, value_pool = (torch.full((6, 4, 2, 8), torch.nan, dtype=dtype) for _ in range(2))
    slots = torch.tensor([13, 2, 23, 0])
    key, value = values(4, 2, 8), values(4, 2, 8, seed=1)
    kv_write.choose(CPU).run(key, value, key_pool, value_pool, slots)
    for pool, written in ((key_pool, key), (value_pool, value)):
        for token, slot in enumerate(slots.tolist()):
            assert torch.equal(pool[slot // 4, slot % 4], written[token].to(dtype))
        assert int(pool.isnan().sum()) == (24 - 4) * 2 * 8


@pytest.mark.parametrize("op", [rms_norm, rope, kv_write])
def test_every_dispatch_says_why(op: object) -> None:
    choice = op.choose(CPU)  # type: ignore[attr-defined]
    assert choice.name in choice.reason
    assert "cpu" in choice.reason
