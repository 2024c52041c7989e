"""Residual addition and the norm that follows it, in one pass over the row."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.kernels.language import check_contiguous, jit, runs_triton, tl, triton
from pi05_ros.model.gemma import RMS_NORM_EPS, normalize_rms
from pi05_ros.model.siglip import LAYER_NORM_EPS


def add_rms_norm(x: Tensor, delta: Tensor | None, scale: Tensor, out: Tensor) -> None:
    """x += delta in place, then out = x / rms(x) * scale.

    x, delta and out [M, W], scale float32 [W] (one plus Gemma's stored weight). delta None: x stays as it is.
    """
    (add_rms_norm_triton if runs_triton(x) else add_rms_norm_plain)(x, delta, scale, out)


def add_rms_norm_plain(x: Tensor, delta: Tensor | None, scale: Tensor, out: Tensor) -> None:
    if delta is not None:
        x.add_(delta)
    out.copy_(normalize_rms(x) * scale)


def add_rms_norm_triton(x: Tensor, delta: Tensor | None, scale: Tensor, out: Tensor) -> None:
    check_contiguous(x=x, delta=delta, scale=scale, out=out)
    rows, width = x.shape
    _add_rms_norm[(rows,)](x, delta, scale, out, WIDTH=width, EPS=RMS_NORM_EPS, **whole_row(width))


def add_layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor, delta_bias: Tensor | None = None
) -> None:
    """x += delta + delta_bias in place, then out = LayerNorm(x).

    x, delta and out [M, W], weight and bias [W] of any float dtype. delta None: x stays as it is. delta_bias [W]: what
    the product that gave delta left out: some library products take longer with it, and here it is free.
    """
    (add_layer_norm_triton if runs_triton(x) else add_layer_norm_plain)(x, delta, weight, bias, out, delta_bias)


def add_layer_norm_plain(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor, delta_bias: Tensor | None = None
) -> None:
    if delta is not None:
        whole = delta.float() if delta_bias is None else delta.float() + delta_bias.float()
        x.copy_(x.float() + whole)
    out.copy_(F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), LAYER_NORM_EPS))


def add_layer_norm_triton(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor, delta_bias: Tensor | None = None
) -> None:
    check_contiguous(x=x, delta=delta, weight=weight, bias=bias, out=out, delta_bias=delta_bias)
    rows, width = x.shape
    options = {"EPS": LAYER_NORM_EPS, **whole_row(width)}
    _add_layer_norm[(rows,)](x, delta, delta_bias, weight, bias, out, WIDTH=width, **options)


def whole_row(width: int, most_warps: int = 16) -> dict[str, int]:
    """Launch options of a kernel whose programs hold one row in registers, 16 numbers or more to the thread."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), most_warps)}


@jit
def _add_rms_norm(x, delta, scale, out, WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    store_row(out, row, rms_normalized(x, delta, scale, row, WIDTH, EPS, BLOCK), WIDTH, BLOCK)


@jit
def _add_layer_norm(
    x, delta, delta_bias, weight, bias, out, WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    value = layer_normalized(x, delta, delta_bias, weight, bias, row, WIDTH, EPS, BLOCK)
    store_row(out, row, value, WIDTH, BLOCK)


# Parts of kernels. A row is a float32 [BLOCK] tensor whose surplus columns are zero.


@jit
def load_row(x, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    return tl.load(x + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@jit
def store_row(x, row, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(x + row * WIDTH + column, value, mask=column < WIDTH)


@jit
def load_sum(x, delta, delta_bias, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The row of x, after what waits in delta has been added to it in place."""
    value = load_row(x, row, WIDTH, BLOCK)
    if delta is not None:
        added = load_row(delta, row, WIDTH, BLOCK)
        if delta_bias is not None:
            added += load_row(delta_bias, 0, WIDTH, BLOCK)
        value += added
        # The norm sees what the next addition will see: the sum as it was stored.
        value = value.to(x.dtype.element_ty).to(tl.float32)
        store_row(x, row, value, WIDTH, BLOCK)
    return value


@jit
def rms_normalized(x, delta, scale, row, WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    value = load_sum(x, delta, None, row, WIDTH, BLOCK)
    mean_square = tl.sum(value * value, 0) / WIDTH
    return value * tl.rsqrt(mean_square + EPS) * load_row(scale, 0, WIDTH, BLOCK)


@jit
def layer_normalized(
    x, delta, delta_bias, weight, bias, row, WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr
):
    value = load_sum(x, delta, delta_bias, row, WIDTH, BLOCK)
    centred = tl.where(tl.arange(0, BLOCK) < WIDTH, value - tl.sum(value, 0) / WIDTH, 0.0)
    variance = tl.sum(centred * centred, 0) / WIDTH
    normalized = centred * tl.rsqrt(variance + EPS)
    return normalized * load_row(weight, 0, WIDTH, BLOCK) + load_row(bias, 0, WIDTH, BLOCK)
