"""The stages on packed weights against the modules that they stand for."""

from __future__ import annotations

import pytest
import torch

from engine.small import TINY, tiny_model
from pi05_ros.engine.packed import PackedWeights, pack
from pi05_ros.engine.stages import embed_prompt, encode_images, encode_prefix
from pi05_ros.model import Pi05Model
from pi05_ros.model.gemma import rotary
from pi05_ros.model.siglip import embed_images

EXACT = {"rtol": 2e-5, "atol": 2e-5}
SPARE = 5
"""Rows of the cache behind the prefix."""


@pytest.fixture(scope="module")
def model() -> Pi05Model:
    return tiny_model()


@pytest.fixture(scope="module")
def weights(model: Pi05Model) -> PackedWeights:
    torch.manual_seed(0)
    return pack(model)


@torch.no_grad()
def test_image_tokens(model: Pi05Model, weights: PackedWeights) -> None:
    images = torch.randn(2, 3, 3, 56, 56).clamp(-1, 1)
    expected = embed_images(model.vision, model.projector, images, torch.ones(2, 3, dtype=torch.bool))
    patches = torch.nn.functional.unfold(images.flatten(0, 1), TINY.vision.patch_size, stride=TINY.vision.patch_size)
    for dtype in (torch.float32, torch.bfloat16):
        tokens = encode_images(weights.vision, patches.mT.contiguous(), TINY.vision.heads, dtype)
        assert tokens.dtype == dtype
        torch.testing.assert_close(tokens, expected.flatten(0, 1).to(dtype), **(EXACT if dtype.itemsize == 4 else {}))


def test_prompt_embeddings_are_bit_equal(model: Pi05Model, weights: PackedWeights) -> None:
    tokens = torch.tensor([[0, 5, 1023], [7, 7, 2]])
    assert torch.equal(embed_prompt(weights.prefix, tokens), model.prefix.embed(tokens))


def prefix_of(weights: PackedWeights, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[keys or values, layers, B, P + SPARE, D]; NaN where nothing was written."""
    batch, positions, _ = x.shape
    layers, head_dim = TINY.prefix.layers, TINY.prefix.head_dim
    kv = torch.full((2, layers, batch, positions + SPARE, head_dim), torch.nan)
    table = rotary(torch.arange(positions)[None], head_dim, torch.float32)
    rope = table.cos[0, 0].contiguous(), table.sin[0, 0].contiguous()
    encode_prefix(weights.prefix, x.clone(), torch.tensor(lengths, dtype=torch.int32), rope, *kv)
    return kv


@pytest.mark.parametrize("lengths", [[24], [24, 17], [1, 23, 24]])
@torch.no_grad()
def test_keys_and_values_of_the_prefix(model: Pi05Model, weights: PackedWeights, lengths: list[int]) -> None:
    x = torch.randn(len(lengths), 24, TINY.prefix.width)
    kv = prefix_of(weights, x, lengths)
    for sample, length in enumerate(lengths):
        rope = rotary(torch.arange(length)[None], TINY.prefix.head_dim, torch.float32)
        expected = model.prefix(x[sample : sample + 1, :length], rope, None)
        for mine, layers in zip(kv, expected, strict=True):
            torch.testing.assert_close(mine[:, sample, :length], torch.stack(layers)[:, 0, 0], **EXACT)
    assert kv[:, :, :, 24:].isnan().all(), "the rows behind are left as they are"


@torch.no_grad()
def test_what_pads_a_prompt_does_not_matter(weights: PackedWeights) -> None:
    x = torch.randn(2, 24, TINY.prefix.width)
    padded = x.clone()
    padded[1, 17:] = torch.nan
    plain, poisoned = prefix_of(weights, x, [24, 17]), prefix_of(weights, padded, [24, 17])
    assert torch.equal(plain[:, :, 0, :24], poisoned[:, :, 0, :24])
    assert torch.equal(plain[:, :, 1, :17], poisoned[:, :, 1, :17])
