"""Patch embedding: one kernel against the library's float32 product."""

from __future__ import annotations

import pytest
import torch

from pi05_ros.engine.kernels.embedding import embed_patches, embed_patches_plain, embed_patches_triton

from .conftest import Place


@pytest.mark.parametrize(("images", "tokens", "depth", "width"), [(2, 9, 588, 48), (1, 16, 12, 16), (3, 5, 64, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embed_patches(place: Place, images: int, tokens: int, depth: int, width: int, dtype: torch.dtype) -> None:
    patches = 2 * torch.rand(images, tokens, depth, device=place.device) - 1
    weight, bias = torch.randn(width, depth, device=place.device), torch.randn(width, device=place.device)
    position = torch.randn(tokens, width, device=place.device)
    out, expected = (place.empty(images * tokens, width, dtype=dtype) for _ in range(2))
    embed_patches_plain(patches, weight, bias, position, expected)
    embed_patches_triton(patches, weight, bias, position, out, block=16)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * depth**0.5, equal_nan=False)


def test_what_is_not_rounded_is_the_librarys() -> None:
    patches, weight, bias, position = torch.randn(1, 4, 6), torch.randn(8, 6), torch.randn(8), torch.randn(4, 8)
    out = torch.empty(4, 8)
    embed_patches(patches, weight, bias, position, out)
    assert torch.equal(out, torch.nn.functional.linear(patches[0], weight, bias) + position)
