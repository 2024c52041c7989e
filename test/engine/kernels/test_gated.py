"""Gate, up and GELU in one kernel against the products by themselves."""

from __future__ import annotations

import pytest

from pi05_ros.engine.kernels.gated import gated_product_plain, gated_product_triton

from .conftest import Place


@pytest.mark.parametrize(("rows", "depth", "width"), [(16, 32, 32), (21, 64, 64), (1, 128, 32)])
def test_gated_product(place: Place, rows: int, depth: int, width: int) -> None:
    x, weight = place.randn(rows, depth), place.randn(2 * width, depth) * depth**-0.5
    out, expected = place.empty(rows, width), place.empty(rows, width)
    gated_product_plain(x, weight, expected)
    gated_product_triton(x, weight, out, block=16)
    place.assert_close(out, expected)
