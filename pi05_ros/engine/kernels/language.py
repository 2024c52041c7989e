"""The one place that imports Triton. Without it the kernels still import, and their plain twins do the work."""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

AVAILABLE = triton is not None
jit: Any = triton.jit if AVAILABLE else lambda function: function
logger = logging.getLogger(__name__)


def runs_triton(x: Tensor) -> bool:
    """Whether an operation on x runs as a Triton kernel. On a GPU without Triton it does not, which is said once.

    Kernels are launched on torch's current device, which is the caller's to set.
    """
    if x.is_cuda and not AVAILABLE:
        _warn()
    return x.is_cuda and AVAILABLE


@functools.cache
def _warn() -> None:
    logger.warning("Triton cannot be imported: the GPU runs plain PyTorch operations instead, which is slower")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Kernels compute addresses themselves. Raises ValueError naming the first tensor that is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
