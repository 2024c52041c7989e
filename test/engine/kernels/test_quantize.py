"""Float8 with a scale for each row.

Triton's interpreter does not round to float8 as a GPU does (it truncates, and loses NaN), so there the kernels write
what is yet to be rounded, in float32. The rounding itself is tested on the GPU, and for the twins, which use PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pi05_ros.engine.kernels import activations, norms, quantize
from pi05_ros.engine.kernels.quantize import FLOAT8, LARGEST

from .conftest import HAVE_GPU, Place

STEP = 2**-3
"""Between neighbours of float8, at most, as a part of the smaller one."""

Quantize = Callable[[Tensor, Tensor], None]


def quantized(function: Quantize, place: Place, rows: int, width: int) -> tuple[Tensor, Tensor]:
    out8 = place.empty(rows, width, dtype=FLOAT8 if HAVE_GPU else torch.float32)
    row_scale = place.empty(rows, 1, dtype=torch.float32)
    function(out8, row_scale)
    return out8.float(), row_scale


def assert_same(place: Place, kernel: Quantize, twin: Quantize, rows: int, width: int) -> None:
    """Not bit by bit: a number in the middle between two of float8's may go either way."""
    (actual, scale), (expected, expected_scale) = (quantized(f, place, rows, width) for f in (kernel, twin))
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    if not HAVE_GPU:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
        return
    torch.testing.assert_close(actual, expected, rtol=STEP, atol=2**-9)
    assert (actual == expected).float().mean() > 0.99


@pytest.mark.parametrize("pending", [True, False], ids=["delta", "no-delta"])
def test_add_rms_norm_fp8(place: Place, pending: bool) -> None:
    x, delta = place.randn(5, 100), place.randn(5, 100) if pending else None
    weight, same_x = torch.rand(100, device=place.device), x.clone()
    assert_same(
        place,
        lambda out8, scale: quantize.add_rms_norm_fp8_triton(x, delta, weight, out8, scale),
        lambda out8, scale: quantize.add_rms_norm_fp8_plain(same_x, delta, weight, out8, scale),
        *x.shape,
    )
    assert torch.equal(x, same_x)


@pytest.mark.parametrize("width", [20, 100, 16384])
def test_geglu_fp8(place: Place, width: int) -> None:
    gate_up = place.randn(5, 2 * width)
    assert_same(
        place,
        lambda out8, scale: quantize.geglu_fp8_triton(gate_up, out8, scale),
        lambda out8, scale: quantize.geglu_fp8_plain(gate_up, out8, scale),
        5,
        width,
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity times zero, as meant
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(place: Place, bad: float) -> None:
    gate_up = place.randn(3, 128)
    gate_up[1, 7] = bad
    out8, scale = quantized(lambda out8, scale: quantize.geglu_fp8_triton(gate_up, out8, scale), place, 3, 64)
    assert (out8 * scale)[1, 7].isnan()
    assert (out8 * scale)[[0, 2]].isfinite().all()


def test_zeros_stay_zeros(place: Place) -> None:
    gate_up = torch.zeros(3, 128, device=place.device, dtype=place.dtype)
    out8, scale = quantized(lambda out8, scale: quantize.geglu_fp8_triton(gate_up, out8, scale), place, 3, 64)
    assert not out8.any()
    assert (scale > 0).all()


def test_the_twin_is_near_what_it_quantises() -> None:
    torch.manual_seed(0)
    x, out8, scale = torch.randn(4, 1000), torch.empty(4, 1000, dtype=FLOAT8), torch.empty(4, 1)
    quantize.quantize_rows(x, out8, scale)
    assert torch.equal(out8.float().abs().amax(dim=1), torch.full((4,), LARGEST))
    torch.testing.assert_close(out8.float() * scale, x, rtol=STEP / 2, atol=float(scale.max()) * 2**-10)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_in_the_twin_what_is_not_finite_stays_visible(bad: float) -> None:
    x, out8, scale = torch.randn(2, 8), torch.empty(2, 8, dtype=FLOAT8), torch.empty(2, 1)
    x[1, 3] = bad
    quantize.quantize_rows(x, out8, scale)
    assert (out8.float() * scale)[1, 3].isnan()
    assert (out8.float() * scale)[0].isfinite().all()


def test_the_fused_twins_are_the_operations_one_after_the_other() -> None:
    torch.manual_seed(0)
    x, gate_up, ones = torch.randn(4, 64), torch.randn(4, 128), torch.ones(64)
    expected = torch.empty(4, 64)
    for fused, separate, values in (
        (quantize.add_rms_norm_fp8, norms.add_rms_norm, (x, None, ones)),
        (quantize.geglu_fp8, activations.geglu, (gate_up,)),
    ):
        out8, scale = torch.empty(4, 64, dtype=FLOAT8), torch.empty(4, 1)
        fused(*values, out8, scale)
        separate(*values, expected)
        torch.testing.assert_close(out8.float() * scale, expected, rtol=STEP / 2, atol=float(scale.max()) * 2**-10)


def test_weights_have_a_scale_for_each_output() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 100) * torch.logspace(-3, 3, 6)[:, None]
    weight8, scale = quantize.quantize_weight(weight.to(torch.bfloat16))
    assert (weight8.dtype, weight8.shape, scale.dtype, scale.shape) == (FLOAT8, (6, 100), torch.float32, (1, 6))
    assert scale.is_contiguous()
    error = (weight8.float() * scale.mT - weight).abs().amax(dim=1) / weight.abs().amax(dim=1)
    assert error.max() < STEP / 2 + 2**-8
