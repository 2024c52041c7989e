"""The first half of a gated MLP as one kernel: two products and the GELU between them.

Apart, the products' result (63 MB for one sample of 968 positions) goes to memory and comes back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.kernels.activations import geglu, gelu_tanh
from pi05_ros.engine.kernels.language import (
    ROOMY,
    TensorDescriptor,
    check_contiguous,
    jit_for_any,
    runs_triton,
    shared_memory,
    tl,
    triton,
)


def gated_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = gelu(x @ gate.T) * (x @ up.T). x [M, K], weight [2 F, K] of gate and up, out [M, F]."""
    (gated_product_triton if _is_one_kernel(x) else gated_product_plain)(x, weight, out)


def _is_one_kernel(x: Tensor) -> bool:
    """Only where tiles are copied by hardware, and many fit, does the kernel keep up with the library's products."""
    return (
        runs_triton(x)
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device)[0] >= 9
        and shared_memory(x.device) >= ROOMY
    )


def gated_product_plain(x: Tensor, weight: Tensor, out: Tensor) -> None:
    geglu(F.linear(x, weight), out)


def gated_product_triton(x: Tensor, weight: Tensor, out: Tensor, block: int = 128) -> None:
    """block: rows and columns of a tile."""
    check_contiguous(x=x, weight=weight, out=out)
    rows, inner, width = len(x), min(64, x.shape[1]), out.shape[1]
    _gated_product[(triton.cdiv(rows, block) * triton.cdiv(width, block),)](
        TensorDescriptor.from_tensor(x, [block, inner]),
        TensorDescriptor.from_tensor(weight, [block, inner]),
        TensorDescriptor.from_tensor(out, [block, block]),
        rows,
        x.shape[1],
        WIDTH=width,
        BLOCK=block,
        INNER=inner,
        num_warps=8,
        num_stages=4 if rows <= 1024 else 3,
    )


@jit_for_any("rows")
def _gated_product(x, weight, out, rows, depth, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr):
    """Tiles of the same columns follow each other, so that all rows find their weights in the cache."""
    row_blocks = tl.cdiv(rows, BLOCK)
    row = tl.program_id(0) % row_blocks * BLOCK
    column = tl.program_id(0) // row_blocks * BLOCK
    gate = tl.zeros((BLOCK, BLOCK), tl.float32)
    up = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, depth, INNER):
        left = x.load([row, k])
        gate = tl.dot(left, weight.load([column, k]).T, gate, input_precision="ieee")
        up = tl.dot(left, weight.load([WIDTH + column, k]).T, up, input_precision="ieee")
    out.store([row, column], (gelu_tanh(gate) * up).to(out.dtype))
