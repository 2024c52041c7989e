"""Matrix products and what prepares their operands, unquantised and in float8."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.kernels.quantize import FLOAT8, quantize_rows
from pi05_ros.engine.products import (
    Matrix,
    Operand,
    gated,
    gelu_product,
    layer_normed,
    product,
    rms_normed,
)

ROWS, WIDTH, OUT = 5, 64, 48
FLOAT8_ERROR = 0.05
"""Relative, of an operand or a product in float8: a number has four bits, so it is off by 1/16 at most."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, WIDTH) * torch.logspace(-3, 3, ROWS)[:, None]  # each row has its own scale


@pytest.fixture
def matrix() -> Matrix:
    return Matrix(torch.randn(OUT, WIDTH) * torch.logspace(-2, 2, OUT)[:, None])


@pytest.fixture
def biased(matrix: Matrix) -> Matrix:
    return Matrix(matrix.weight, torch.randn(OUT))


def operand(x: Tensor, matrix: Matrix) -> Operand:
    """x for a product with the matrix, as the norms make it."""
    if matrix.scale is None:
        return Operand(x)
    quantized = Operand(torch.empty_like(x, dtype=FLOAT8), torch.empty(len(x), 1))
    quantize_rows(x, quantized.values, quantized.scale)
    return quantized


def values(x: Operand) -> Tensor:
    """An operand as numbers."""
    return x.values.float() if x.scale is None else x.values.float() * x.scale


def assert_operand(x: Operand, expected: Tensor, float8: bool) -> None:
    if not float8:
        assert x.scale is None
        torch.testing.assert_close(x.values, expected, rtol=1e-6, atol=1e-6)
        return
    assert (x.values.dtype, x.scale.shape) == (FLOAT8, (len(expected), 1))
    assert_near(values(x), expected)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = FLOAT8_ERROR) -> None:
    """Row by row."""
    assert ((actual - expected).norm(dim=1) <= tolerance * expected.norm(dim=1)).all()


def test_a_product(x: Tensor, matrix: Matrix, biased: Matrix) -> None:
    assert torch.equal(product(Operand(x), biased, torch.float32), F.linear(x, biased.weight, biased.bias))
    assert torch.equal(product(Operand(x), matrix, torch.float32), x @ matrix.weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_in_float8(x: Tensor, matrix: Matrix, dtype: torch.dtype) -> None:
    quantized = matrix.quantized()
    assert (quantized.weight.dtype, quantized.scale.shape) == (FLOAT8, (1, OUT))
    assert_near(quantized.weight.float() * quantized.scale.T, matrix.weight)
    y = product(operand(x, quantized), quantized, dtype)
    assert y.dtype == dtype
    scale = matrix.weight.norm(dim=1)  # outputs are of as many sizes as rows of the weight
    assert_near(y.float() / scale, x @ matrix.weight.T / scale)


def test_the_last_rows_of_a_matrix(x: Tensor, matrix: Matrix) -> None:
    y, whole = (product(Operand(x), one, torch.float32) for one in (matrix.last_rows(16), matrix))
    torch.testing.assert_close(y, whole[:, -16:])


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("added", [True, False])
def test_norms_add_first(x: Tensor, matrix: Matrix, added: bool, float8: bool) -> None:
    matrix = matrix.quantized() if float8 else matrix
    delta, pending = (torch.randn_like(x), torch.randn(WIDTH)) if added else (None, None)
    weight, bias = 1 + 0.1 * torch.randn(WIDTH), torch.randn(WIDTH)
    total = x + delta if added else x.clone()
    summed = x.clone()
    assert_operand(rms_normed(summed, delta, weight, matrix), F.rms_norm(total, (WIDTH,), weight, 1e-6), float8)
    torch.testing.assert_close(summed, total)
    total = total + pending if added else total
    summed = x.clone()
    normed = layer_normed(summed, delta, weight, bias, pending)
    assert_operand(normed, F.layer_norm(total, (WIDTH,), weight, bias, 1e-6), float8=False)
    torch.testing.assert_close(summed, total)


def test_a_product_without_its_bias(x: Tensor, biased: Matrix) -> None:
    whole, rest = (product(Operand(x), one, torch.float32) for one in (biased, biased.without_bias()))
    torch.testing.assert_close(rest + biased.bias, whole)


@pytest.mark.parametrize("second_float8", [False, True])
@pytest.mark.parametrize("first_float8", [False, True])
def test_gated(x: Tensor, first_float8: bool, second_float8: bool) -> None:
    x, first, second = F.normalize(x) * 3, Matrix(torch.randn(2 * OUT, WIDTH)), Matrix(torch.randn(WIDTH, OUT))
    gate, up = (x @ first.weight.T).chunk(2, dim=1)
    expected = F.gelu(gate, approximate="tanh") * up
    first = first.quantized() if first_float8 else first
    second = second.quantized() if second_float8 else second
    hidden = gated(operand(x, first), first, second, torch.float32)
    assert (hidden.scale is not None) is second_float8
    if first_float8 or second_float8:
        assert_near(values(hidden), expected, 2 * FLOAT8_ERROR)  # a product of two
    else:
        torch.testing.assert_close(values(hidden), expected)


def test_gelu_product(x: Tensor, biased: Matrix) -> None:
    x, matrix = F.normalize(x) * 3, Matrix(F.normalize(biased.weight), biased.bias)
    hidden = gelu_product(Operand(x), matrix, torch.float32)
    assert hidden.scale is None
    torch.testing.assert_close(hidden.values, F.gelu(F.linear(x, matrix.weight, matrix.bias), approximate="tanh"))
