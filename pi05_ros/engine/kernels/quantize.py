"""Float8 (e4m3) activations and weights for scaled matrix products: x is about x8 * scale, with a scale for each row.

Scales of activations are taken from the row itself, so nothing has to be calibrated. A row's largest number becomes
float8's largest. NaN and infinity come back as NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pi05_ros.engine.kernels.activations import geglu_plain, gelu_tanh
from pi05_ros.engine.kernels.language import check_contiguous, jit, runs_triton, tl
from pi05_ros.engine.kernels.norms import add_rms_norm_plain, load_row, rms_normalized, store_row, whole_row
from pi05_ros.model.gemma import RMS_NORM_EPS

FLOAT8 = torch.float8_e4m3fn
LARGEST, SMALLEST_PEAK = 448.0, 1e-12
"""Float8's largest number; and a row of smaller numbers than the latter is scaled as if that were its largest, so that
zeros stay zeros. The kernels repeat both."""


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> float8 [N, K] and its scales, float32 [1, N]: one for each output."""
    quantized = torch.empty_like(weight, dtype=FLOAT8)
    scale = torch.empty(len(weight), 1, device=weight.device)
    quantize_rows(weight, quantized, scale)
    return quantized, scale.view(1, -1)


# In what follows x and delta are [M, W], out8 float8 [M, W] and row_scale float32 [M, 1].


def quantize_rows(x: Tensor, out8: Tensor, row_scale: Tensor) -> None:
    """x -> out8 and row_scale. In PyTorch: a part of the twins, and for weights. The kernels have store_quantized."""
    x = x.float()
    row_scale.copy_(x.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_PEAK) / LARGEST)
    out8.copy_(x * (1.0 / row_scale))


def add_rms_norm_fp8(x: Tensor, delta: Tensor | None, scale: Tensor, out8: Tensor, row_scale: Tensor) -> None:
    """norms.add_rms_norm, quantised before it is rounded to anything else."""
    (add_rms_norm_fp8_triton if runs_triton(x) else add_rms_norm_fp8_plain)(x, delta, scale, out8, row_scale)


def add_rms_norm_fp8_plain(x: Tensor, delta: Tensor | None, scale: Tensor, out8: Tensor, row_scale: Tensor) -> None:
    normalized = torch.empty_like(x, dtype=torch.float32)
    add_rms_norm_plain(x, delta, scale, normalized)
    quantize_rows(normalized, out8, row_scale)


def add_rms_norm_fp8_triton(x: Tensor, delta: Tensor | None, scale: Tensor, out8: Tensor, row_scale: Tensor) -> None:
    check_contiguous(x=x, delta=delta, scale=scale, out8=out8, row_scale=row_scale)
    rows, width = x.shape
    options = {"EPS": RMS_NORM_EPS, **whole_row(width)}
    _add_rms_norm_fp8[(rows,)](x, delta, scale, out8, row_scale, WIDTH=width, **options)


def geglu_fp8(gate_up: Tensor, out8: Tensor, row_scale: Tensor) -> None:
    """activations.geglu of gate_up [M, 2 W], quantised before it is rounded to anything else."""
    (geglu_fp8_triton if runs_triton(gate_up) else geglu_fp8_plain)(gate_up, out8, row_scale)


def geglu_fp8_plain(gate_up: Tensor, out8: Tensor, row_scale: Tensor) -> None:
    activated = torch.empty_like(out8, dtype=torch.float32)
    geglu_plain(gate_up, activated)
    quantize_rows(activated, out8, row_scale)


def geglu_fp8_triton(gate_up: Tensor, out8: Tensor, row_scale: Tensor) -> None:
    check_contiguous(gate_up=gate_up, out8=out8, row_scale=row_scale)
    rows, width = out8.shape
    options = whole_row(width, most_warps=32)  # a program holds two rows, gate and up: the wide ones are faster so
    _geglu_fp8[(rows,)](gate_up, out8, row_scale, WIDTH=width, **options)


@jit
def _add_rms_norm_fp8(x, delta, scale, out8, row_scale, WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    value = rms_normalized(x, delta, scale, row, WIDTH, EPS, BLOCK)
    store_quantized(out8, row_scale, row, value, WIDTH, BLOCK)


@jit
def _geglu_fp8(gate_up, out8, row_scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    gate, up = load_row(gate_up, 2 * row, WIDTH, BLOCK), load_row(gate_up, 2 * row + 1, WIDTH, BLOCK)
    store_quantized(out8, row_scale, row, gelu_tanh(gate) * up, WIDTH, BLOCK)


@jit
def store_quantized(out8, row_scale, row, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Part of the kernels above: value is a row in float32 whose surplus columns are zero."""
    # A maximum passes NaN over, so a row with a NaN is scaled by its other numbers. The scale of infinity is infinity,
    # which makes NaN of the row.
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / 448.0
    tl.store(row_scale + row, scale)
    store_row(out8, row, value * (1.0 / scale), WIDTH, BLOCK)
