"""Products with 8- and 4-bit weights in Triton's interpreter against the reference, and the quantizers themselves."""

from __future__ import annotations

import pytest
import torch

from kernels.quant_matmul import reference
from kernels.quant_matmul.weights import QuantizedWeight, dequantize, quantize_int4, quantize_int8
from tests.kernels.interpreted import BFLOAT16_VALUES, DTYPES, FLOAT16, FLOAT32, KERNELS, exact_dot, poisoned, values

__all__ = ["exact_dot", "poisoned"]

triton_path = KERNELS["quant_matmul"]
quant_matmul = triton_path.quant_matmul
SPLIT_INPUTS = triton_path.SPLIT_INPUTS
TOLERANCE = {FLOAT32: 2e-6, FLOAT16: 1e-3, BFLOAT16_VALUES: 2e-6}


def quantized(bits: int, num_outputs: int, num_inputs: int, group_size: int = 32) -> QuantizedWeight:
    weight = values(num_outputs, num_inputs, seed=5) / num_inputs**0.5
    return quantize_int8(weight) if bits == 8 else quantize_int4(weight, group_size)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(0, 8, 64), (1, 1, 32), (1, 96, 576), (17, 70, 96), (65, 33, 192), (3, 40, SPLIT_INPUTS + 32)],
)
def test_products(rows: int, outputs: int, inputs: int, bits: int, kind: str) -> None:
    x, weight = values(rows, inputs, kind=kind), quantized(bits, outputs, inputs)
    found, expected = quant_matmul(x, weight), reference.quant_matmul(x, weight)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=TOLERANCE[kind], rtol=TOLERANCE[kind])


@pytest.mark.parametrize("inputs", [1, 33, 100, SPLIT_INPUTS + 7])
def test_int8_takes_any_number_of_inputs(inputs: int) -> None:
    x, weight = values(5, inputs), quantized(8, 9, inputs)
    torch.testing.assert_close(quant_matmul(x, weight), reference.quant_matmul(x, weight), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_groups(group_size: int) -> None:
    x, weight = values(2, 3, 256), quantized(4, 9, 256, group_size)
    found = quant_matmul(x, weight)
    assert found.shape == (2, 3, 9)
    torch.testing.assert_close(found, reference.quant_matmul(x, weight), atol=2e-6, rtol=2e-6)


@pytest.mark.usefixtures("exact_dot")
@pytest.mark.parametrize("kind", [FLOAT32, FLOAT16])
@pytest.mark.parametrize("bits", [8, 4])
def test_splitting_changes_no_bit(bits: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = values(18, 2 * SPLIT_INPUTS + 64, kind=kind), quantized(bits, 40, 2 * SPLIT_INPUTS + 64)
    split = quant_matmul(x, weight, is_invariant=True)
    monkeypatch.setattr(triton_path, "_ENOUGH_PROGRAMS", 0)
    assert torch.equal(quant_matmul(x, weight, is_invariant=True), split)


@pytest.mark.usefixtures("exact_dot")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_s_bits_do_not_depend_on_its_batch(bits: int) -> None:
    x, weight = values(70, SPLIT_INPUTS + 64, kind=FLOAT16), quantized(bits, 24, SPLIT_INPUTS + 64)
    together = quant_matmul(x, weight, is_invariant=True)
    for row in (0, 17, 69):
        assert torch.equal(quant_matmul(x[row : row + 1], weight, is_invariant=True)[0], together[row])


def test_int8_is_within_half_a_step_of_each_channel() -> None:
    weight = values(7, 50) * torch.arange(7)[:, None]
    quantized_weight = quantize_int8(weight)
    error = (dequantize(quantized_weight) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 127 * 0.5001).all()
    assert quantized_weight.shape == (7, 50)


@pytest.mark.parametrize("group_size", [32, 64])
def test_int4_is_within_a_step_of_each_group(group_size: int) -> None:
    weight = values(6, 128) * torch.arange(6)[:, None]
    found = dequantize(quantize_int4(weight, group_size)).view(6, -1, group_size)
    groups = weight.view(6, -1, group_size)
    step = groups.abs().amax(2, keepdim=True) / 8
    error = (found - groups).abs()
    assert (error <= step * 1.0001).all()  # a whole step only at the short end of the range
    assert error.mean() < step.mean() * 0.3
    largest = groups.abs().argmax(2, keepdim=True)
    torch.testing.assert_close(found.gather(2, largest), groups.gather(2, largest))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 32 do not divide 40"):
        quantize_int4(values(4, 40), 32)
    with pytest.raises(ValueError, match="groups of 48"):
        quantize_int4(values(4, 96), 48)
    with pytest.raises(ValueError, match="33 inputs, the weight 32"):
        quant_matmul(values(2, 33), quantized(8, 4, 32))
