"""SigLIP's patch embedding in float32: product, bias, position and the rounding to the tower's own dtype in one kernel.

The library multiplies float32 matrices without the tensor cores. Here each number is taken as the sum of two of 11
bits: the three larger of the four partial products on the tensor cores are float32's result but for its last bits.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.kernels.language import check_contiguous, jit_for_any, runs_triton, tl, triton


def embed_patches(patches: Tensor, weight: Tensor, bias: Tensor, position: Tensor, out: Tensor) -> None:
    """out = patches @ weight.T + bias + position.

    patches [N, T, K], weight [W, K], bias [W], position [T, W], all of one dtype; out [N * T, W] of any.
    """
    rounds = out.dtype != patches.dtype
    (embed_patches_triton if runs_triton(patches) and rounds else embed_patches_plain)(
        patches, weight, bias, position, out
    )


def embed_patches_plain(patches: Tensor, weight: Tensor, bias: Tensor, position: Tensor, out: Tensor) -> None:
    out.copy_((F.linear(patches, weight, bias) + position).flatten(0, 1))


def embed_patches_triton(
    patches: Tensor, weight: Tensor, bias: Tensor, position: Tensor, out: Tensor, block: int = 64
) -> None:
    """block: rows and columns of a tile."""
    check_contiguous(patches=patches, weight=weight, bias=bias, position=position, out=out)
    rows, width = out.shape
    _embed_patches[(triton.cdiv(rows, block), triton.cdiv(width, block))](
        patches, weight, bias, position, out, rows,
        TOKENS=len(position), WIDTH=width, DEPTH=patches.shape[-1], BLOCK=block, INNER=32, num_warps=4, num_stages=3,
    )  # fmt: skip


@jit_for_any("rows")
def _embed_patches(
    patches, weight, bias, position, out, rows,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, INNER)
    row_ok, column_ok = (row < rows)[:, None], column < WIDTH
    y = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, DEPTH, INNER):
        there = k + inner < DEPTH
        left = tl.load(patches + row[:, None] * DEPTH + (k + inner)[None, :], mask=row_ok & there[None, :], other=0.0)
        at = column[:, None] * DEPTH + (k + inner)[None, :]
        right = tl.load(weight + at, mask=column_ok[:, None] & there[None, :], other=0.0)
        y = tl.dot(left, tl.trans(right), y, input_precision="tf32x3")
    y += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    inside = row_ok & column_ok[None, :]
    at = (row % TOKENS)[:, None] * WIDTH + column[None, :]
    y += tl.load(position + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * WIDTH + column[None, :], y.to(out.dtype.element_ty), mask=inside)
