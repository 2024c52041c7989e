"""Camera images on the GPU are what Pillow and PyTorch make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pi05_ros.engine.images import DIALECTS
from pi05_ros.engine.kernels import images

from .conftest import Place

PATCH = 14
SIDES = st.integers(1, 64)
FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def camera(place: Place, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, shape, generator=random, dtype=torch.uint8)
    # In the middle between two pixel values, where truncation and rounding differ most.
    pixels = pixels if dtype == torch.uint8 else (pixels + torch.rand(shape, generator=random)) / 256
    return pixels.to(place.device)


def patches(function: Callable[..., None], place: Place, cameras: Tensor, size: int, dialect: str) -> Tensor:
    plan = images.resize_plan(*cameras.shape[1:3], size, dialect, place.device)
    out = place.empty(len(cameras), (size // PATCH) ** 2, 3 * PATCH * PATCH)
    function(cameras, out, plan, PATCH)
    return out


def assert_equal_to_twin(place: Place, cameras: Tensor, size: int, dialect: str) -> None:
    actual = patches(images.images_to_patches_triton, place, cameras, size, dialect)
    expected = patches(images.images_to_patches_plain, place, cameras, size, dialect)
    if dialect == "openpi":
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=2**-8 if place.dtype == torch.bfloat16 else 1e-6)


@FEW
@given(height=SIDES, width=SIDES, seed=st.integers(0, 2**32))
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["uint8", "float32"])
def test_any_size(place: Place, dtype: torch.dtype, dialect: str, height: int, width: int, seed: int) -> None:
    assert_equal_to_twin(place, camera(place, (1, height, width, 3), dtype, seed), 28, dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("height", "width"), [(28, 28), (29, 28), (30, 40), (40, 30), (12, 10)])
def test_several_cameras(place: Place, height: int, width: int, dialect: str) -> None:
    assert_equal_to_twin(place, camera(place, (3, height, width, 3), torch.uint8), 28, dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_image_of_the_right_size_is_one_tap(dialect: str) -> None:
    plan = images.resize_plan(56, 56, 56, dialect, "cpu")
    assert len(plan.rows.weights) == len(plan.columns.weights) == 1


def test_images_of_another_size_are_refused() -> None:
    plan = images.resize_plan(56, 60, 28, "openpi", "cpu")
    with pytest.raises(ValueError, match=r"^images: expected \[N, 56, 60, 3\], got \[2, 60, 56, 3\]"):
        images.images_to_patches(torch.zeros(2, 60, 56, 3), torch.empty(2, 4, 588), plan, PATCH)
