"""The native int8 product: its definition, the same bits on every instruction set, and numbers that are not finite."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import library
from kernels.cpu.library import Library, Matrix
from kernels.quant_matmul.reference import coded_products
from kernels.quant_matmul.weights import QuantizedWeight, dequantize, quantize_int8

SHAPES = [(64, 32), (576, 96), (100, 40), (1536, 64), (4096, 33)]  # inputs, outputs
ROWS = [1, 2, 3, 5, 12, 13, 200]


def activations(rows: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """With outliers, as language models have them, and a group of nothing but zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, num_inputs, generator=generator)
    x[:, ::37] *= 30
    x[rows // 2, :64] = 0
    return x


def weight(num_inputs: int, num_outputs: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(num_inputs)
    w = torch.randn(num_outputs, num_inputs, generator=generator)
    w[num_outputs // 3] = 0
    return quantize_int8(w)


def product(lib: Library, x: torch.Tensor, w: QuantizedWeight) -> torch.Tensor:
    panels, scales = lib.pack_int8(w.values, w.scales)
    return lib.product(
        x, Matrix(panels.data_ptr(), scales.data_ptr(), library.Form.CODES), len(w.values), is_coded=True
    )


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_the_product_is_its_definition(libraries: list[Library], rows: int, num_inputs: int, num_outputs: int) -> None:
    x, w = activations(rows, num_inputs), weight(num_inputs, num_outputs)
    expected = coded_products(x, dequantize(w))
    rounding = 1e-6 * float((x.abs() @ dequantize(w).abs().T).max())
    for lib in libraries:
        torch.testing.assert_close(product(lib, x, w).double(), expected, rtol=0, atol=rounding)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_instruction_sets_and_numbers_of_rows_agree_to_the_bit(
    libraries: list[Library], num_inputs: int, num_outputs: int
) -> None:
    x, w = activations(200, num_inputs), weight(num_inputs, num_outputs)
    expected = product(libraries[0], x, w)
    for lib in libraries:
        for rows in ROWS:
            assert torch.equal(product(lib, x[:rows], w), expected[:rows]), (lib.variant.name, rows)


@pytest.mark.parametrize("extreme", [-127, 127])
def test_the_largest_sums_do_not_overflow(libraries: list[Library], extreme: int) -> None:
    """All codes and weights at the end of their range: where 16 bits would saturate, and a group's sum is largest."""
    w = QuantizedWeight(torch.full((32, 128), extreme, dtype=torch.int8), torch.ones(32, 1), 8, 128)
    for sign in (1.0, -1.0):
        for lib in libraries:
            found = product(lib, torch.full((3, 128), sign), w)
            assert torch.allclose(found, torch.full((3, 32), sign * extreme * 128.0), rtol=1e-6), lib.variant.name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_spoils_its_own_row_alone(libraries: list[Library], value: float) -> None:
    x, w = activations(5, 192), weight(192, 32)
    clean = product(libraries[0], x, w)
    x[2, 130] = value
    for lib in libraries:
        found = product(lib, x, w)
        assert found[2].isnan().all(), lib.variant.name
        assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("size", [1e-45, 1e-38, 3e-37, 5e-37])
def test_numbers_too_small_to_divide_by_are_as_good_as_zeros(libraries: list[Library], size: float) -> None:
    """127 / 1e-38 is infinite; some of the group are zeros, so what overflows would not cancel."""
    x, w = activations(5, 192), weight(192, 32)
    x[2, 64:96] = size
    x[2, 64:69] = 0
    found = [product(lib, x, w) for lib in libraries]
    assert all(torch.equal(each, found[0]) for each in found)
    x[2, 64:96] = 0
    torch.testing.assert_close(found[0], product(libraries[0], x, w))


def test_groups_are_of_the_size_that_the_definition_says() -> None:
    from kernels.quant_matmul.reference import CODE_GROUP

    assert library.CODE_GROUP == CODE_GROUP
