"""A batch's inputs cross to the device in one copy, from memory that the device can read by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes; what the device's widest loads and its allocator's blocks want."""


class Staging:
    """Named arrays in one block of pinned host memory, and tensors in a block of the same layout on the device."""

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        """fields: shape and dtype by name. On a CPU both sides are the same memory, and nothing is ever copied."""
        offsets, size = {}, 0
        for name, (shape, dtype) in fields.items():
            offsets[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else self._host
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (shape, dtype) in fields.items():
            end = offsets[name] + math.prod(shape) * dtype.itemsize
            self.host[name] = self._host[offsets[name] : end].view(dtype).view(shape).numpy()
            self.device[name] = self._device[offsets[name] : end].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._device.nbytes

    def upload(self) -> None:
        """Bring the host's side to the device's, in stream order; can be captured in a graph.

        The host's side must stay as it is until that is done.
        """
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
