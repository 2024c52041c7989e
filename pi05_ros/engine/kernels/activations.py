"""Gated GELU over the fused gate and up projections."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.kernels.language import check_contiguous, jit, runs_triton, tl, triton

BLOCK = 1024
"""Columns of a program: 8 to the thread, which is one 16-byte access in bfloat16."""


def geglu(gate_up: Tensor, out: Tensor) -> None:
    """out = gelu(gate) * up, with GELU's tanh form. gate_up [M, 2 N] holds the gates first, out [M, N]."""
    (geglu_triton if runs_triton(out) else geglu_plain)(gate_up, out)


def geglu_plain(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


def geglu_triton(gate_up: Tensor, out: Tensor) -> None:
    check_contiguous(gate_up=gate_up, out=out)
    rows, width = out.shape
    _geglu[(triton.cdiv(width, BLOCK), rows)](gate_up, out, WIDTH=width, BLOCK=BLOCK, num_warps=4)


@jit
def _geglu(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside).to(tl.float32)
    tl.store(out + row * WIDTH + column, gelu_tanh(gate) * up, mask=inside)


@jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(u)) is x sigmoid(2 u): nothing overflows, and no digits cancel where tanh(u) is near -1."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
