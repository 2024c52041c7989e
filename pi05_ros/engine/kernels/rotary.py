"""Rotary embedding of fused queries, keys and values, written to where attention reads them."""

from __future__ import annotations

from torch import Tensor

from pi05_ros.engine.kernels.language import check_contiguous, jit, runs_triton, tl, triton
from pi05_ros.model.gemma import Rotary


def rotate_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Rotate queries and keys of positions 0 to P - 1; values are copied.

    qkv [B, P, (heads + 2 kv_heads) D]: queries, keys, values. cos and sin float32 [positions, D / 2], at least P
    positions. q_out [B, P, heads, D]. k_cache and v_cache [B, C, kv_heads D], C at least P, each row contiguous; row p
    belongs to position p, and rows from P on are left as they are. The halves of D are the two coordinates.
    """
    length = qkv.shape[1]
    for name, table, rows in (("cos", cos, 0), ("sin", sin, 0), ("k_cache", k_cache, 1), ("v_cache", v_cache, 1)):
        if table.shape[rows] < length:
            raise ValueError(f"{name}: expected at least {length} positions, got {table.shape[rows]}")
    (rotate_qkv_triton if runs_triton(qkv) else rotate_qkv_plain)(qkv, cos, sin, q_out, k_cache, v_cache)


def rotate_qkv_plain(qkv: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    length, heads, head_dim = q_out.shape[1:]
    kv_heads = k_cache.shape[-1] // head_dim
    by_head = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    q, k, v = by_head.split((heads, kv_heads, kv_heads), dim=1)
    rope = Rotary(cos[:length], sin[:length])
    q_out.copy_(rope.rotate(q.float()).transpose(1, 2))
    k_cache[:, :length].copy_(rope.rotate(k.float()).transpose(1, 2).flatten(-2))
    v_cache[:, :length].copy_(v.transpose(1, 2).flatten(-2))


def rotate_qkv_triton(qkv: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    check_contiguous(qkv=qkv, cos=cos, sin=sin, q_out=q_out, k_row=k_cache[0, 0], v_row=v_cache[0, 0])
    batch, length, heads, head_dim = q_out.shape
    kv_heads = k_cache.shape[-1] // head_dim
    _rotate_qkv[(length, batch)](
        qkv,
        cos,
        sin,
        q_out,
        k_cache,
        v_cache,
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_HEADS=triton.next_power_of_2(heads + 2 * kv_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )


@jit
def _rotate_qkv(
    qkv,
    cos,
    sin,
    q_out,
    k_cache,
    v_cache,
    k_batch,
    k_position,
    v_batch,
    v_position,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One program holds all heads of a position, as two tiles [head, coordinate]."""
    position = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    row = batch * tl.num_programs(0) + position
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None]
    inside = half < HALF
    is_q = (head < HEADS) & inside
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS) & inside
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS) & inside
    at = head * 2 * HALF + half

    source = qkv + row * (HEADS + 2 * KV_HEADS) * 2 * HALF + at
    x1 = tl.load(source, mask=is_q | is_k | is_v).to(tl.float32)
    x2 = tl.load(source + HALF, mask=is_q | is_k | is_v).to(tl.float32)
    angle = position * HALF + half
    c, s = tl.load(cos + angle, mask=inside), tl.load(sin + angle, mask=inside)
    rotated1, rotated2 = x1 * c - x2 * s, x2 * c + x1 * s

    q = q_out + row * HEADS * 2 * HALF + at
    tl.store(q, rotated1, mask=is_q)
    tl.store(q + HALF, rotated2, mask=is_q)
    k = k_cache + batch * k_batch + position * k_position + at - HEADS * 2 * HALF
    tl.store(k, rotated1, mask=is_k)
    tl.store(k + HALF, rotated2, mask=is_k)
    v = v_cache + batch * v_batch + position * v_position + at - (HEADS + KV_HEADS) * 2 * HALF
    tl.store(v, x1, mask=is_v)
    tl.store(v + HALF, x2, mask=is_v)
