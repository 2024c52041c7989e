"""Residual addition and norm: the kernels do what plain PyTorch does, and what the model's own norms do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pi05_ros.engine.kernels import norms
from pi05_ros.model.gemma import RMSNorm

from .conftest import Place

WIDTHS = (64, 100, 1152, 2048)


@pytest.mark.parametrize("pending", [True, False], ids=["delta", "no-delta"])
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(place: Place, width: int, pending: bool) -> None:
    x, delta, out = place.randn(5, width), place.randn(5, width) if pending else None, place.empty(5, width)
    scale = 1.0 + torch.randn(width, device=place.device)
    expected_x, expected_out = x.clone(), place.empty(5, width)
    norms.add_rms_norm_plain(expected_x, delta, scale, expected_out)
    norms.add_rms_norm_triton(x, delta, scale, out)
    assert torch.equal(x, expected_x)
    place.assert_close(out, expected_out)


@pytest.mark.parametrize("pending", ["delta and bias", "delta", ""])
@pytest.mark.parametrize("width", WIDTHS)
def test_add_layer_norm(place: Place, width: int, pending: str) -> None:
    x, delta, out = place.randn(5, width) + 3, place.randn(5, width) if pending else None, place.empty(5, width)
    weight, bias = place.randn(width), place.randn(width)
    delta_bias = place.randn(width) if "bias" in pending else None
    expected_x, expected_out = x.clone(), place.empty(5, width)
    norms.add_layer_norm_plain(expected_x, delta, weight, bias, expected_out, delta_bias)
    norms.add_layer_norm_triton(x, delta, weight, bias, out, delta_bias)
    assert torch.equal(x, expected_x)
    place.assert_close(out, expected_out)


def test_add_rms_norm_is_the_model_s() -> None:
    norm, x, out = RMSNorm(64), torch.randn(3, 64), torch.empty(3, 64)
    nn.init.normal_(norm.weight)
    norms.add_rms_norm(x, None, 1.0 + norm.weight.detach(), out)
    assert torch.equal(out, norm(x).detach())


def test_add_layer_norm_is_the_model_s() -> None:
    norm, x, out = nn.LayerNorm(64, eps=1e-6), torch.randn(3, 64), torch.empty(3, 64)
    nn.init.normal_(norm.weight)
    norms.add_layer_norm(x, None, norm.weight.detach(), norm.bias.detach(), out)
    assert torch.equal(out, norm(x).detach())


def test_nan_stays_in_its_row(place: Place) -> None:
    x, out = place.randn(3, 64), place.empty(3, 64)
    x[1, 7] = torch.nan
    norms.add_rms_norm_triton(x, None, torch.ones(64, device=place.device), out)
    assert out.isnan().any(dim=1).tolist() == [False, True, False]


def test_a_transposed_tensor_is_refused_by_name(place: Place) -> None:
    x, out = place.randn(64, 64), place.empty(64, 64)
    with pytest.raises(ValueError, match=r"^delta: expected a contiguous tensor, got strides \(1, 64\)"):
        norms.add_rms_norm_triton(x, place.randn(64, 64).mT, torch.ones(64, device=place.device), out)
