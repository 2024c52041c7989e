"""Rotation of fused queries, keys and values into the places where attention reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pi05_ros.engine.kernels import rotary
from pi05_ros.model.gemma import rotary as model_rotary

from .conftest import Place


def tables(positions: int, head_dim: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin, each [positions, head_dim / 2]"""
    rope = model_rotary(torch.arange(positions, device=device)[None], head_dim, torch.float32)
    return rope.cos[0, 0], rope.sin[0, 0]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 1, 256), (4, 1, 16), (6, 2, 24)])
def test_rotate_qkv(place: Place, heads: int, kv_heads: int, head_dim: int) -> None:
    batch, length, rows = 2, 5, 8
    qkv = place.randn(batch, length, (heads + 2 * kv_heads) * head_dim)
    cos, sin = tables(6, head_dim, place.device)

    def buffers() -> tuple[Tensor, Tensor, Tensor]:
        caches = place.empty(2, 3, batch, rows, kv_heads * head_dim)  # of three layers; the second one's is written
        return place.empty(batch, length, heads, head_dim), caches[0, :, :][1], caches[1, :, :][1]

    actual, expected = buffers(), buffers()
    rotary.rotate_qkv_plain(qkv, cos, sin, *expected)
    rotary.rotate_qkv_triton(qkv, cos, sin, *actual)
    place.assert_close(actual[0], expected[0])
    place.assert_close(actual[1][:, :length], expected[1][:, :length])
    assert torch.equal(actual[2][:, :length], expected[2][:, :length])
    assert actual[1][:, length:].isnan().all()
    assert actual[2][:, length:].isnan().all()


def test_caches_of_other_strides(place: Place) -> None:
    """The keys and values of a position may lie in one row."""
    qkv, (cos, sin) = place.randn(2, 3, 4 * 16), tables(3, 16, place.device)
    rows, expected = place.empty(2, 4, 2, 16), place.empty(2, 4, 2, 16)
    for kernel, cache in ((rotary.rotate_qkv_triton, rows), (rotary.rotate_qkv_plain, expected)):
        kernel(qkv, cos, sin, place.empty(2, 3, 2, 16), cache[:, :, 0], cache[:, :, 1])
    place.assert_close(rows[:, :3], expected[:, :3])


def test_the_plain_twin_is_the_model_s() -> None:
    qkv, (cos, sin) = torch.randn(1, 3, 4 * 16), tables(3, 16)
    q, k, v = torch.empty(1, 3, 2, 16), torch.empty(1, 3, 16), torch.empty(1, 3, 16)
    rotary.rotate_qkv(qkv, cos, sin, q, k, v)
    rope = model_rotary(torch.arange(3)[None], 16, torch.float32)
    expected = rope.rotate(qkv.unflatten(-1, (4, 16)).transpose(1, 2)).transpose(1, 2)
    assert torch.equal(q, expected[:, :, :2])
    assert torch.equal(k, expected[:, :, 2])
    assert torch.equal(v, qkv[..., 48:])


@pytest.mark.parametrize("field", ["cos", "sin", "k_cache", "v_cache"])
def test_too_few_positions_are_refused_by_name(field: str) -> None:
    cos, sin = tables(3, 16)
    given = {
        "qkv": torch.randn(1, 3, 64),
        "cos": cos,
        "sin": sin,
        "q_out": torch.empty(1, 3, 2, 16),
        "k_cache": torch.empty(1, 3, 16),
        "v_cache": torch.empty(1, 3, 16),
    }
    given[field] = given[field][:2] if field in ("cos", "sin") else given[field][:, :2]
    with pytest.raises(ValueError, match=f"^{field}: expected at least 3 positions, got 2"):
        rotary.rotate_qkv(**given)
