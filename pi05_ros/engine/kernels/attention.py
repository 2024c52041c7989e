"""Attention of the prefix: every position sees every position that counts, all query heads share keys and values.

How many positions count differs by sample and is read on the device, so one captured graph serves every prompt that
fits its bucket. Library attention wants a mask for that, and its fastest kernels take none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.kernels.language import (
    ROOMY,
    check_contiguous,
    jit_for_any,
    runs_triton,
    shared_memory,
    tl,
    triton,
)


def attend(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, out: Tensor) -> None:
    """out = softmax(q keys^T / sqrt(D)) values over the first lengths[b] keys of sample b.

    q, out: [B, P, heads, D]; keys, values: [B, C, D], C at least P; lengths: int32 [B]. Rows of out at positions that
    do not count are arbitrary.
    """
    (attend_triton if runs_triton(q) else attend_plain)(q, keys, values, lengths, out)


def attend_plain(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, out: Tensor) -> None:
    length = q.shape[1]
    seen = torch.arange(length, device=q.device) < lengths[:, None]
    k, v = (cache[:, :length].masked_fill(~seen[:, :, None], 0.0)[:, None] for cache in (keys, values))
    k, v = (one.expand(-1, q.shape[2], -1, -1) for one in (k, v))
    attended = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen[:, None, None])
    out.copy_(attended.transpose(1, 2))


def attend_triton(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, out: Tensor) -> None:
    check_contiguous(q=q, out=out, keys_row=keys[0], values_row=values[0])
    batch, length, heads, head_dim = q.shape
    rows = length * heads
    block, block_keys, warps, stages = _tiles(q.dtype, batch, q.device)
    _attend[(triton.cdiv(rows, block), batch)](
        q, keys, values, lengths, out, rows, keys.stride(0), values.stride(0),
        D=head_dim, SCALE=head_dim**-0.5 * 1.4426950408889634, BM=block, BN=block_keys, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip


def _tiles(dtype: torch.dtype, batch: int, device: torch.device) -> tuple[int, int, int, int]:
    """Query rows and keys of a tile, warps, pipeline stages.

    64 rows make one wave on 132 multiprocessors of one sample of 968 positions; with more samples larger tiles win.
    """
    if dtype == torch.float32:
        return 16, 32, 4, 1
    if shared_memory(device) < ROOMY:
        return 64, 32, 4, 2
    return (64, 64, 4, 3) if batch == 1 else (128, 64, 8, 2)


@jit_for_any("rows")
def _attend(
    q, keys, values, lengths, out, rows, keys_stride, values_stride,
    D: tl.constexpr, SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BM query rows of a sample against all its keys. SCALE contains log2(e): softmax runs on exp2.

    The scale is applied where the maximum is taken off: one multiply and add in the innermost loop.
    """
    sample = tl.program_id(1)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = row < rows
    d = tl.arange(0, D)
    at = (sample * rows + row)[:, None] * D + d[None, :]
    queries = tl.load(q + at, mask=row_ok[:, None], other=0.0)
    count = tl.load(lengths + sample)
    keys += sample * keys_stride
    values += sample * values_stride
    largest = tl.full((BM,), -1.0e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    attended = tl.zeros((BM, D), tl.float32)
    for first in tl.range(0, count, BN, num_stages=STAGES):
        key = first + tl.arange(0, BN)
        key_ok = key < count
        k = tl.load(keys + key[:, None] * D + d[None, :], mask=key_ok[:, None], other=0.0)
        logits = tl.dot(queries, tl.trans(k), input_precision="ieee")
        logits = tl.where(key_ok[None, :], logits, -1.0e30)
        larger = tl.maximum(largest, tl.max(logits, 1) * SCALE)
        p = tl.exp2(logits * SCALE - larger[:, None])
        shrink = tl.exp2(largest - larger)
        v = tl.load(values + key[:, None] * D + d[None, :], mask=key_ok[:, None], other=0.0)
        attended = tl.dot(p.to(v.dtype), v, attended * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        largest = larger
    tl.store(out + at, (attended / total[:, None]).to(out.dtype.element_ty), mask=row_ok[:, None])
