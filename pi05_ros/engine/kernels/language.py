"""The one place that imports Triton. Without it the kernels still import, and their plain twins do the work."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

AVAILABLE = triton is not None
jit: Any = triton.jit if AVAILABLE else lambda function: function


def jit_for_any(*sizes: str) -> Any:
    """jit, but compiled once for all values of the named integers, where a kernel gains nothing by knowing more."""
    return functools.partial(triton.jit, do_not_specialize=list(sizes)) if AVAILABLE else lambda function: function


logger = logging.getLogger(__name__)


def runs_triton(x: Tensor) -> bool:
    """Whether an operation on x runs as a Triton kernel. On a GPU without Triton it does not, which is said once.

    Kernels are launched on torch's current device, which is the caller's to set.
    """
    if x.is_cuda and not AVAILABLE:
        _warn()
    return x.is_cuda and AVAILABLE


ROOMY = 200 * 1024
"""Bytes of shared memory that a program of the larger GPUs (compute capability 9.0, 10.0) has at least."""


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; 0 on a CPU, where tiles are those of the smaller GPUs."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def check_compiler() -> None:
    """Triton builds the code that launches a kernel with the system's C compiler, when the kernel first runs.

    Raises ValueError that says what is missing, so that it is known before a robot waits for the first chunk.
    """
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not AVAILABLE:
        return
    if "CC" not in os.environ and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise ValueError(
            "compile_mode: the GPU kernels need a C compiler (gcc or clang on the PATH, or CC); found none"
        )
    if not header.is_file():
        raise ValueError(f"compile_mode: the GPU kernels need Python's C headers; {header} is not there (python3-dev)")


@functools.cache
def _warn() -> None:
    logger.warning("Triton cannot be imported: the GPU runs plain PyTorch operations instead, which is slower")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Kernels compute addresses themselves. Raises ValueError naming the first tensor that is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
