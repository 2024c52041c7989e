"""How ``denoise.py``'s kernel cuts its work, and the memory it works in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pi05_ros.engine.kernels.language import ROOMY, shared_memory
from pi05_ros.engine.packed import ExpertWeights


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles; all but parts, stages and warps are in rows, columns or keys. Powers of two, but for stages.

    rows, columns, inner: a tile of a product, and how much of the inner dimension is in one of its ``stages``.
    gate_columns: columns where gate and up lie side by side.
    parts: stretches of the inner dimension of the products that are added to the residual stream, summed in a phase
    of their own; 1: they are taken whole, without that phase. part_columns, part_inner, part_stages: of these products.
    query_rows, keys: a tile of attention; block_keys, attention_stages: how its keys are taken.
    merged_rows, combined_rows: rows that a program takes at once where sums are taken. warps: of a program.
    """

    rows: int
    columns: int
    gate_columns: int
    inner: int
    stages: int
    parts: int
    part_columns: int
    part_inner: int
    part_stages: int
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
        reads; the others are what fits a GPU with half its shared memory. benchmarks/flow_tilings.py tries others.
        """
        if width < 256:
            return _TEST_MODELS
        if dtype == torch.float32:
            return _FLOAT32
        small, large = (_ONE, _MANY) if shared_memory(device) >= ROOMY else (_ONE_SMALL, _MANY_SMALL)
        return small if rows <= small.rows else large

    def check(self, width: int, heads_width: int, head_dim: int, mlp: int) -> None:
        """Raises ValueError naming the size of a model that these tiles do not divide: kernels mask rows only."""
        for name, value, least in (
            ("expert.width", width, max(self.part_columns, self.inner)),
            ("prefix.heads * prefix.head_dim", heads_width, self.parts * self.part_inner),
            ("prefix.head_dim", head_dim, self.columns),
            ("expert.mlp", mlp, max(self.parts * self.part_inner, self.gate_columns // 2)),
        ):
            if value % least:
                raise ValueError(f"{name}: the fast path expects a multiple of {least}, got {value}")


_ONE = Tiling(
    rows=64,
    columns=32,
    gate_columns=64,
    inner=128,
    stages=4,
    parts=8,
    part_columns=64,
    part_inner=64,
    part_stages=6,
    query_rows=32,
    keys=128,
    block_keys=128,
    attention_stages=1,
    combined_rows=8,
)
_MANY = Tiling(
    rows=128,
    columns=64,
    gate_columns=128,
    inner=64,
    stages=6,
    parts=4,
    part_columns=64,
    part_inner=64,
    part_stages=6,
    query_rows=128,
    keys=128,
    block_keys=64,
    attention_stages=2,
    combined_rows=16,
)
_ONE_SMALL = replace(_ONE, inner=64, part_stages=4, block_keys=32, attention_stages=2, combined_rows=4)
_MANY_SMALL = replace(_ONE_SMALL, columns=64, combined_rows=16)
_FLOAT32 = replace(
    _ONE_SMALL,
    inner=32,
    stages=3,
    part_inner=32,
    part_stages=3,
    query_rows=16,
    keys=32,
    block_keys=32,
    attention_stages=1,
)
_TEST_MODELS = Tiling(
    rows=16,
    columns=16,
    gate_columns=16,
    inner=16,
    stages=1,
    parts=2,
    part_columns=16,
    part_inner=16,
    part_stages=1,
    query_rows=16,
    keys=32,
    block_keys=16,
    attention_stages=1,
    warps=4,
)


@dataclass(frozen=True)
class DenoiseBuffers:
    """Scratch of the kernel, for one shape of batch: M = B * H rows, S stretches of keys, P parts of a product.

    squares: [M, tiles], of a row of x the sum of squares over each tile's columns; where products are taken whole.
    """

    x: Tensor
    h: Tensor
    q: Tensor
    attended: Tensor
    hidden: Tensor
    parts: Tensor
    squares: Tensor
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
    def allocate(weights: ExpertWeights, keys: Tensor, horizon: int, tiling: Tiling | None = None) -> DenoiseBuffers:
        """keys: the cache [layers, B, capacity, D], whose capacity leaves room for the horizon.

        tiling: None for that of ``Tiling.of``.
        """
        _, batch, capacity, head_dim = keys.shape
        width, heads_width, mlp = weights.out.shape[1], weights.out.shape[2], weights.down.shape[2]
        rows, dtype, device = batch * horizon, keys.dtype, keys.device
        tiling = tiling or Tiling.of(rows, dtype, width, device)
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
            parts=scratch(tiling.parts if tiling.parts > 1 else 0, rows, width),
            squares=scratch(rows if tiling.parts == 1 else 0, width // tiling.part_columns),
            part=scratch(stretches, query_rows, head_dim),
            part_max=scratch(stretches, query_rows),
            part_sum=scratch(stretches, query_rows),
            row_cos=scratch(rows, head_dim // 2),
            row_sin=scratch(rows, head_dim // 2),
            counter=scratch(1, dtype=torch.int32),
            tiling=tiling,
        )
