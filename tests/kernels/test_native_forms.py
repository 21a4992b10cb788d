"""The forms that a matrix is kept in on the native CPU path: what each can hold, and that none changes a bit."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import Form, Library, Matrix
from kernels.quant_matmul.reference import coded_products

SHAPES = [(32, 33), (576, 96), (1536, 64), (608, 40)]  # inputs, outputs: 608 are more than one block of k
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 24, 25, 31, 97, 200]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def short(x: torch.Tensor) -> torch.Tensor:
    """Floats of 11 bits, as GGUF's scales are."""
    return x.half().float()


def grouped(inputs: int, outputs: int, low: int, high: int, offsets: torch.Tensor | None) -> torch.Tensor:
    """scale * q + offset by groups of 32 inputs, rounded once, q over all of low .. high."""
    generator = torch.Generator().manual_seed(inputs + outputs + high)
    q = torch.randint(low, high + 1, (outputs, inputs // 32, 32), generator=generator)
    q[:, :, 5], q[:, :, 11] = low, high
    scales = short(0.001 + random(outputs, inputs // 32, 1, seed=1).abs() / 50)
    exact = scales.double() * q + (0 if offsets is None else offsets.double())
    return exact.float().reshape(outputs, inputs)


def q4_1(inputs: int, outputs: int) -> torch.Tensor:
    """Some offsets are tiny beside their scales."""
    offsets = random(outputs, inputs // 32, 1, seed=2)
    offsets[::7] /= 4096
    return grouped(inputs, outputs, 0, 15, short(offsets))


def q4_1_symmetric(inputs: int, outputs: int) -> torch.Tensor:
    """With offsets as weights around zero have them: some scales below it."""
    middle = short(0.001 + random(outputs, inputs // 32, 1, seed=1).abs() / 50) * -8
    return grouped(inputs, outputs, 0, 15, short(middle * (1 + random(outputs, inputs // 32, 1, seed=2) / 20)))


def q4_0(inputs: int, outputs: int) -> torch.Tensor:
    """Here the extreme of greatest size falls on -8, so that scales have either sign."""
    signs = torch.where(random(outputs, inputs // 32, 1, seed=3) < 0, -1.0, 1.0)
    return (grouped(inputs, outputs, -8, 7, None).view(outputs, -1, 32) * signs).reshape(outputs, inputs)


def q8_0(inputs: int, outputs: int) -> torch.Tensor:
    return grouped(inputs, outputs, -127, 127, None)


def bfloat16(inputs: int, outputs: int) -> torch.Tensor:
    return random(outputs, inputs, seed=4).bfloat16().float()


MADE = {
    "q4_1": (q4_1, Form.GROUPED4),
    "q4_1, symmetric": (q4_1_symmetric, Form.NEAR4),
    "q4_0": (q4_0, Form.NEAR4),
    "q8_0": (q8_0, Form.GROUPED8),
    "bfloat16": (bfloat16, Form.HALVES),
    "float32": (lambda inputs, outputs: random(outputs, inputs, seed=5), Form.FLOATS),
    "smallest scales": (lambda inputs, outputs: q4_0(inputs, outputs).sign() * 7 * 2.0**-24, Form.NEAR4),
    "zeros": (lambda inputs, outputs: torch.zeros(outputs, inputs), Form.NEAR4),
}


def product(lib: Library, form: Form, x: torch.Tensor, weight: torch.Tensor, is_coded: bool = False) -> torch.Tensor:
    packed = lib.pack_as(form, weight)
    assert packed is not None
    return lib.product(x, Matrix(packed.data_ptr(), None, form), len(weight), is_coded)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_smallest_form_that_holds_all_is_taken_and_no_product_changes(
    libraries: list[Library], made: str, inputs: int, outputs: int
) -> None:
    make, form = MADE[made]
    weight, x = make(inputs, outputs), random(max(ROWS), inputs, seed=6)
    expected = product(libraries[0], Form.FLOATS, x, weight)
    torch.testing.assert_close(expected, x @ weight.T, atol=1e-3, rtol=1e-4)
    for lib in libraries:
        packed, found = lib.pack(weight)
        assert found == form, lib.variant.name
        for rows in ROWS:
            result = lib.product(x[:rows], Matrix(packed.data_ptr(), None, found), outputs, is_coded=False)
            assert torch.equal(result, expected[:rows]), (lib.variant.name, rows)


@pytest.mark.parametrize("made", MADE)
def test_one_float_that_does_not_fit_makes_the_matrix_take_a_larger_form(libraries: list[Library], made: str) -> None:
    make, _ = MADE[made]
    weight, x = make(96, 40), random(3, 96)
    weight[39, 95] = 0.1 + 2**-20  # neither on a group's grid nor in 16 bits
    for lib in libraries:
        packed, form = lib.pack(weight)
        assert form == Form.FLOATS
        found = lib.product(x, Matrix(packed.data_ptr(), None, form), 40, is_coded=False)
        torch.testing.assert_close(found, x @ weight.T)


def test_an_offset_that_is_tiny_beside_its_scale_is_kept_and_rounds_nothing(libraries: list[Library]) -> None:
    """The faster form holds sums of both; where they would not be exact, the slower is taken."""
    x = random(7, 64)
    for lib in libraries:
        forms = []
        for shift in range(0, 20, 2):
            weight = grouped(64, 32, 0, 15, short(torch.full((32, 2, 1), 0.19 * 2.0**-shift)))
            packed, form = lib.pack(weight)
            expected = product(libraries[0], Form.FLOATS, x, weight)
            for rows in (1, 3, 7):
                found = lib.product(x[:rows], Matrix(packed.data_ptr(), None, form), 32, is_coded=False)
                assert torch.equal(found, expected[:rows]), (lib.variant.name, shift, rows)
            forms.append(form)
        assert forms == sorted(forms, reverse=True) and set(forms) == {Form.NEAR4, Form.GROUPED4}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_kept_as_they_are(libraries: list[Library], value: float) -> None:
    weight = q4_1(64, 32)
    weight[3, 40] = value
    for lib in libraries:
        packed, form = lib.pack(weight)
        assert form in (Form.HALVES, Form.FLOATS)
        found = lib.product(torch.ones(1, 64), Matrix(packed.data_ptr(), None, form), 32, is_coded=False)
        assert not found[0, 3].isfinite() and found[0, [0, 1, 2, 4, 31]].isfinite().all()


def test_groups_need_whole_groups_of_inputs(libraries: list[Library]) -> None:
    weight = torch.zeros(8, 40)
    for lib in libraries:
        assert all(lib.pack_as(form, weight) is None for form in (Form.NEAR4, Form.GROUPED4, Form.GROUPED8))
        assert lib.pack(weight)[1] == Form.HALVES


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_int8_product_with_weights_of_4_bits_is_its_definition(
    libraries: list[Library], inputs: int, outputs: int
) -> None:
    weight, x = q4_1(inputs, outputs), random(max(ROWS), inputs, seed=7)
    x[:, ::37] *= 30
    x[1, :32] = 0
    expected = coded_products(x, weight)
    rounding = 1e-6 * float((x.abs() @ weight.abs().T).max())
    first = product(libraries[0], Form.GROUPED4, x, weight, is_coded=True)
    torch.testing.assert_close(first.double(), expected, rtol=0, atol=rounding)
    for lib in libraries:
        for rows in ROWS:
            found = product(lib, Form.GROUPED4, x[:rows], weight, is_coded=True)
            assert torch.equal(found, first[:rows]), (lib.variant.name, rows)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_of_4_bits_do_not_overflow(libraries: list[Library], sign: float) -> None:
    """Every code at the end of its range and every weight at 15: where 16 bits come nearest to their end."""
    weight = torch.full((32, 64), 15.0)
    weight[:, ::32] = 0.0  # so that the scale is 1 and the offset 0
    x = torch.full((7, 64), 127.0 * sign)
    for lib in libraries:
        found = product(lib, Form.GROUPED4, x, weight, is_coded=True)
        torch.testing.assert_close(found, torch.full((7, 32), sign * 127 * 15 * 62))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_spoils_its_own_row_alone(libraries: list[Library], value: float) -> None:
    weight, x = q4_1(192, 32), random(5, 192)
    clean = product(libraries[0], Form.GROUPED4, x, weight, is_coded=True)
    x[2, 130] = value
    for lib in libraries:
        found = product(lib, Form.GROUPED4, x, weight, is_coded=True)
        assert found[2].isnan().all(), lib.variant.name
        assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
