"""How ``denoise.py``'s kernel cuts its work, and the memory it works in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pi05_ros.engine.packed import ExpertWeights


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles; all but parts, stages and warps are in rows, columns or keys. Powers of two, but for stages.

    rows, columns, inner: a tile of a product, and how much of the inner dimension is in one of its ``stages``.
    part_columns, gate_columns: columns where a product is summed afterwards, and where gate and up lie side by side.
    parts: stretches of the inner dimension of a product that is summed afterwards.
    query_rows, keys: a tile of attention; block_keys, attention_stages: how its keys are taken.
    merged_rows, combined_rows: rows that a program takes at once where sums are taken. warps: of a program.
    """

    rows: int
    columns: int
    part_columns: int
    gate_columns: int
    inner: int
    stages: int
    parts: int
    query_rows: int
    keys: int
    block_keys: int
    attention_stages: int
    merged_rows: int = 1
    combined_rows: int = 4
    warps: int = 8

    @staticmethod
    def of(rows: int, dtype: torch.dtype, width: int, device: torch.device) -> Tiling:
        """For ``rows`` action tokens, activations of ``dtype`` and an expert of ``width``.

        Found by trying on an H200, where a tile of each product for every multiprocessor is worth more than fewer
        reads. Half the shared memory is all that the smaller GPUs have.
        """
        if width < 256:  # test models
            return Tiling(16, 16, 16, 16, 16, 1, 2, 16, 32, 16, 1, warps=4)
        roomy = device.type == "cuda" and _shared_memory(device) >= 200 * 1024
        if dtype == torch.float32:
            return Tiling(64, 32, 64, 64, 32, 3, 8, 16, 32, 32, 1)
        if rows <= 64:
            if roomy:
                return Tiling(64, 32, 64, 64, 64, 6, 8, 32, 128, 64, 3)
            return Tiling(64, 32, 64, 64, 64, 4, 8, 32, 128, 32, 2)
        if roomy:
            return Tiling(128, 64, 128, 128, 64, 4, 8, 128, 128, 64, 2, combined_rows=16)
        return Tiling(64, 64, 64, 64, 64, 4, 8, 32, 128, 32, 2, combined_rows=16)


def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@dataclass(frozen=True)
class DenoiseBuffers:
    """Scratch of the kernel, for one shape of batch: M = B * H rows, S stretches of keys, P parts of a product."""

    x: Tensor
    h: Tensor
    q: Tensor
    attended: Tensor
    hidden: Tensor
    parts: Tensor
    part: Tensor
    part_max: Tensor
    part_sum: Tensor
    row_cos: Tensor
    row_sin: Tensor
    counter: Tensor
    tiling: Tiling

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    @staticmethod
    def allocate(weights: ExpertWeights, keys: Tensor, horizon: int) -> DenoiseBuffers:
        """keys: the cache [layers, B, capacity, D], whose capacity leaves room for the horizon."""
        _, batch, capacity, head_dim = keys.shape
        width, heads_width, mlp = weights.out.shape[1], weights.out.shape[2], weights.down.shape[2]
        rows, dtype, device = batch * horizon, keys.dtype, keys.device
        tiling = Tiling.of(rows, dtype, width, device)
        stretches = -(-capacity // tiling.keys)
        query_rows = rows * heads_width // head_dim

        def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return DenoiseBuffers(
            x=scratch(rows, width),
            h=scratch(rows, width, dtype=dtype),
            q=scratch(rows, heads_width, dtype=dtype),
            attended=scratch(rows, heads_width, dtype=dtype),
            hidden=scratch(rows, mlp, dtype=dtype),
            parts=scratch(tiling.parts, rows, width),
            part=scratch(stretches, query_rows, head_dim),
            part_max=scratch(stretches, query_rows),
            part_sum=scratch(stretches, query_rows),
            row_cos=scratch(rows, head_dim // 2),
            row_sin=scratch(rows, head_dim // 2),
            counter=scratch(1, dtype=torch.int32),
            tiling=tiling,
        )
