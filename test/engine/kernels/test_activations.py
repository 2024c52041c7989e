"""Gated GELU."""

from __future__ import annotations

import pytest
import torch

from pi05_ros.engine.kernels import activations

from .conftest import Place

# exp of a large number is meant to be infinity; NumPy, which the interpreter computes with, says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize("width", [128, 1000, 4304])
def test_geglu(place: Place, width: int) -> None:
    gate_up, out, expected = 3 * place.randn(4, 2 * width), place.empty(4, width), place.empty(4, width)
    activations.geglu_plain(gate_up, expected)
    activations.geglu_triton(gate_up, out)
    place.assert_close(out, expected)


def test_large_numbers_do_not_overflow(place: Place) -> None:
    gates = torch.tensor([-3e38, -1e20, -100.0, 0.0, 100.0, 1e20, 3e38], device=place.device).to(place.dtype)
    out = place.empty(1, 7)
    activations.geglu_triton(torch.cat((gates, torch.ones_like(gates)))[None], out)
    assert torch.equal(out[0], gates.clamp_min(0))
