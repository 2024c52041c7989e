"""Camera images to the patches that SigLIP embeds, in one launch: resize, padding, normalisation and unfolding.

Both dialects of engine/images.py resize an axis at a time, each output row and column being a weighted sum of a few
neighbouring input rows and columns. Those taps depend on the sizes only: a plan holds them, the kernel applies them.
"openpi" is Pillow's arithmetic to the last bit: integer weights, and rounding to 8 bits after either axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.images import fit, image_to_model
from pi05_ros.engine.kernels.language import check_contiguous, jit, runs_triton, tl, triton

PILLOW_BITS = 22
"""Fraction bits of Pillow's weights: 32 less 8 for the pixel and 2 for the sum."""


@dataclass(frozen=True)
class Taps:
    """What each of S output rows (or columns) is made of.

    first: int32 [S], the first of its input rows. weights: [taps, S], of that row and those after it; zero where there
    are fewer, and all of them in the padding. int32 (Pillow's fixed point) for openpi, float32 for lerobot.
    """

    first: Tensor
    weights: Tensor

    def to(self, device: torch.device | str) -> Taps:
        return Taps(self.first.to(device), self.weights.to(device))


@dataclass(frozen=True)
class ResizePlan:
    """How images [height, width, 3] become squares of ``size`` in a dialect."""

    height: int
    width: int
    size: int
    dialect: str
    rows: Taps
    columns: Taps


def resize_plan(height: int, width: int, size: int, dialect: str, device: torch.device | str) -> ResizePlan:
    """Computed on the host; worth keeping."""
    new_height, new_width, top, left = fit(height, width, size)
    taps = {"openpi": _pillow_taps, "lerobot": _bilinear_taps}[dialect]
    rows = _padded(*taps(height, new_height), top, size)
    columns = _padded(*taps(width, new_width), left, size)
    return ResizePlan(height, width, size, dialect, rows.to(device), columns.to(device))


def images_to_patches(images: Tensor, out: Tensor, plan: ResizePlan, patch: int) -> None:
    """RGB images [N, h, w, 3], uint8 (0..255) or float32 (0..1) -> out [N, (S / patch)^2, 3 patch^2] in [-1, 1].

    Patches follow each other row by row; numbers of a patch are ordered by channel, row, column, as F.unfold has them.
    """
    if images.shape[1:] != (plan.height, plan.width, 3):
        raise ValueError(f"images: expected [N, {plan.height}, {plan.width}, 3], got {list(images.shape)}")
    (images_to_patches_triton if runs_triton(images) else images_to_patches_plain)(images, out, plan, patch)


def images_to_patches_plain(images: Tensor, out: Tensor, plan: ResizePlan, patch: int) -> None:
    pixels = torch.stack([image_to_model(image, plan.size, plan.dialect) for image in images.cpu().numpy()])
    out.copy_(F.unfold(pixels, patch, stride=patch).mT)


def images_to_patches_triton(images: Tensor, out: Tensor, plan: ResizePlan, patch: int) -> None:
    check_contiguous(images=images, out=out)
    patches = (plan.size // patch) ** 2
    _images_to_patches[(patches, 3, len(images))](
        images,
        out,
        plan.rows.first,
        plan.rows.weights,
        plan.columns.first,
        plan.columns.weights,
        plan.height,
        plan.width,
        ROW_TAPS=len(plan.rows.weights),
        COLUMN_TAPS=len(plan.columns.weights),
        SIZE=plan.size,
        PATCH=patch,
        BITS=PILLOW_BITS if plan.dialect == "openpi" else None,
        BLOCK=triton.next_power_of_2(patch * patch),
        num_warps=4,
    )


def _pillow_taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Pillow's triangle filter, which widens where an image shrinks: first [target], weights [target, taps]."""
    scale = source / target
    support = max(scale, 1.0)
    centre = (np.arange(target) + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + support + 0.5).astype(np.int64), source)
    tap = np.arange((last - first).max())
    distance = np.abs((tap + first[:, None] - centre[:, None] + 0.5) * (1.0 / support))
    weights = np.where(tap < (last - first)[:, None], np.maximum(1.0 - distance, 0.0), 0.0)
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # one after the other: np.sum rounds differently from Pillow's loop
    return first, (0.5 + weights * (1 << PILLOW_BITS)).astype(np.int32)


def _bilinear_taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """F.interpolate's without antialiasing, to its last bit: first [target], weights [target, 2].

    A float32 scale, and a position that is rounded to float32 once (it is a fused multiply and add).
    """
    scale = np.float32(source) / np.float32(target)
    position = (np.float64(scale) * (np.arange(target) + 0.5) - 0.5).astype(np.float32).clip(min=0.0)
    first = np.minimum(position.astype(np.int64), source - 1)
    second = np.where(first < source - 1, position - first.astype(np.float32), np.float32(0.0))
    return first, np.stack((np.float32(1.0) - second, second), axis=1)


def _padded(first: np.ndarray, weights: np.ndarray, before: int, size: int) -> Taps:
    """On the axis of the whole square. Without taps that are zero for all: an image of the right size has one."""
    used = 1 + np.flatnonzero(weights.any(axis=0)).max()
    padding = (before, size - before - len(first))
    padded = np.pad(weights[:, :used].T, ((0, 0), padding))
    return Taps(
        torch.from_numpy(np.pad(first, padding).astype(np.int32)), torch.from_numpy(np.ascontiguousarray(padded))
    )


@jit
def _images_to_patches(
    images,
    out,
    row_first,
    row_weights,
    column_first,
    column_weights,
    height,
    width,
    ROW_TAPS: tl.constexpr,
    COLUMN_TAPS: tl.constexpr,
    SIZE: tl.constexpr,
    PATCH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program makes one channel of one patch. Each of its rows resizes its input rows anew: that is cheaper than
    a second launch or a trip through memory.
    """
    patch, channel, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pixel = tl.arange(0, BLOCK)
    inside = pixel < PATCH * PATCH
    y = patch // (SIZE // PATCH) * PATCH + pixel // PATCH
    x = patch % (SIZE // PATCH) * PATCH + pixel % PATCH

    column_weight: tl.tuple = ()
    for tap in tl.static_range(COLUMN_TAPS):
        column_weight += (tl.load(column_weights + tap * SIZE + x, mask=inside, other=0),)
    row = tl.load(row_first + y, mask=inside, other=0)
    column = tl.load(column_first + x, mask=inside, other=0)
    images += image * height * width * 3 + channel

    total = tl.zeros((BLOCK,), column_weights.dtype.element_ty)
    for k in range(ROW_TAPS):
        row_weight = tl.load(row_weights + k * SIZE + y, mask=inside, other=0)
        source = images + ((row + k) * width + column) * 3
        line = tl.zeros((BLOCK,), column_weights.dtype.element_ty)
        for tap in tl.static_range(COLUMN_TAPS):
            needed = (row_weight != 0) & (column_weight[tap] != 0)
            value = tl.load(source + tap * 3, mask=needed, other=0)
            if BITS is None and value.dtype == tl.uint8:
                value = tl.div_rn(value.to(tl.float32), 255.0)
            elif BITS is not None and value.dtype == tl.float32:
                value = 255.0 * value  # truncated, as openpi does
            line += value.to(line.dtype) * column_weight[tap]
        if BITS is not None:
            line = rounded(line, BITS)
        total += line * row_weight

    if BITS is not None:
        value = tl.div_rn(rounded(total, BITS).to(tl.float32), 255.0)
    else:
        value = tl.minimum(tl.maximum(total, 0.0), 1.0)
    out += (image * (SIZE // PATCH) * (SIZE // PATCH) + patch) * 3 * PATCH * PATCH + channel * PATCH * PATCH
    tl.store(out + pixel, value * 2.0 - 1.0, mask=inside)


@jit
def rounded(total, BITS: tl.constexpr):
    """A sum of pixels in Pillow's fixed point -> 0..255."""
    return tl.minimum(tl.maximum((total + (1 << (BITS - 1))) >> BITS, 0), 255)
