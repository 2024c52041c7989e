"""Matrix products of the vision tower and of the prefix, in the model's own dtype or, in the prefix, in float8.

A matrix that has been quantised wants its operand quantised as well, one scale a row. So what comes before it (an RMS
norm, a gated GELU) asks the matrix which operand to make, and never writes the unquantised one to memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.kernels.activations import geglu
from pi05_ros.engine.kernels.norms import add_layer_norm, add_rms_norm
from pi05_ros.engine.kernels.quantize import FLOAT8, add_rms_norm_fp8, geglu_fp8, quantize_weight


@dataclass(frozen=True)
class Matrix:
    """weight [out, in]; bias [out] or None; scale: float32 [1, out] if the weight is float8, else None, never both."""

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None

    def quantized(self) -> Matrix:
        """The same, which has no bias, in float8 (e4m3), one scale for each output."""
        assert self.bias is None
        weight, scale = quantize_weight(self.weight)
        return Matrix(weight, scale=scale)

    def without_bias(self) -> Matrix:
        """For a product whose bias is added by what comes next."""
        assert self.scale is None
        return Matrix(self.weight)

    def last_rows(self, count: int) -> Matrix:
        """The last ``count`` outputs alone, of a matrix with neither bias nor scale."""
        assert self.bias is None
        assert self.scale is None
        return Matrix(self.weight[-count:])


@dataclass(frozen=True)
class Operand:
    """values [M, in]; scale: float32 [M, 1] if they are float8, else None."""

    values: Tensor
    scale: Tensor | None = None


def product(x: Operand, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias, [M, out] of ``dtype``."""
    if matrix.scale is None:
        return F.linear(x.values, matrix.weight, matrix.bias)
    assert x.scale is not None
    if not x.values.is_cuda:
        return F.linear(x.values.float() * x.scale, matrix.weight.float() * matrix.scale.mT).to(dtype)
    return torch._scaled_mm(
        x.values,
        matrix.weight.t(),
        scale_a=x.scale,
        scale_b=matrix.scale,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def rms_normed(x: Tensor, delta: Tensor | None, scale: Tensor, matrix: Matrix) -> Operand:
    """x += delta, and its RMS norm for a product with ``matrix``."""
    if matrix.scale is None:
        normed = torch.empty_like(x)
        add_rms_norm(x, delta, scale, normed)
        return Operand(normed)
    quantized = _empty_float8(x, x.shape[1])
    add_rms_norm_fp8(x, delta, scale, quantized.values, _scale(quantized))
    return quantized


def layer_normed(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, delta_bias: Tensor | None = None
) -> Operand:
    """x += delta + delta_bias, and its LayerNorm."""
    normed = torch.empty_like(x)
    add_layer_norm(x, delta, weight, bias, normed, delta_bias)
    return Operand(normed)


def gated(x: Operand, gate_up: Matrix, down: Matrix, dtype: torch.dtype) -> Operand:
    """gelu(gate) * up of x [M, in], for a product with ``down``. gate_up: [2 F, in]."""
    width = gate_up.weight.shape[0] // 2
    both = product(x, gate_up, dtype)
    if down.scale is None:
        hidden = both.new_empty(len(both), width)
        geglu(both, hidden)
        return Operand(hidden)
    quantized = _empty_float8(both, width)
    geglu_fp8(both, quantized.values, _scale(quantized))
    return quantized


def gelu_product(x: Operand, matrix: Matrix, dtype: torch.dtype) -> Operand:
    """gelu(x @ weight.T + bias). Not for float8."""
    if x.values.is_cuda and matrix.bias is not None:  # GELU inside the product: one kernel
        return Operand(torch._addmm_activation(matrix.bias, x.values, matrix.weight.t(), use_gelu=True))
    return Operand(F.gelu(product(x, matrix, dtype), approximate="tanh"))


def _empty_float8(x: Tensor, width: int) -> Operand:
    """Room for what is quantised of x [M, ...]: values [M, width]."""
    return Operand(x.new_empty(x.shape[0], width, dtype=FLOAT8), x.new_empty(x.shape[0], 1, dtype=torch.float32))


def _scale(x: Operand) -> Tensor:
    assert x.scale is not None
    return x.scale
