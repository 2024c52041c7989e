"""All denoise steps of a chunk in one kernel launch.

The action expert reads 0.6 GB of weights a step and computes little with them: 50 rows. Launched as separate kernels it
is bound by launches and by the time each takes to fill the memory pipeline. Here one program per multiprocessor stays
for the whole flow and walks through the phases of every layer of every step; a barrier of all programs stands where a
phase needs what others wrote, and while a program waits there, the weights that it will need soon are on their way to
the cache.

Phases (W expert width, D head width, M = B * H rows):

    start      x = action_in(x_t); h = norm(x)                          one row a program
    qkv        q, k, v = h @ Wqkv, rotated; k and v go to the cache     tiles of columns
    attend     softmax(q k) v over one stretch of keys                  tiles of (query rows, stretch)
    combine    the stretches become one                                 some query rows a program
    out        attended @ Wo over one stretch of Wo's inputs            tiles of (columns, stretch)
    merge      x += gate * sum of the stretches; h = norm(x)            one row a program
    gate_up    gelu(h @ Wgate) * (h @ Wup)                              tiles of columns
    down       as out                                                   tiles of (columns, stretch)
    finish     merge, then x_t += dt * action_out(h), and start         one row a program

Sums over stretches are taken in a fixed order: a chunk is the same bit by bit each time. A phase can also be run alone,
without a barrier, which is how Triton's interpreter does it: it runs one program after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.kernels.activations import gelu_tanh
from pi05_ros.engine.kernels.language import AVAILABLE, jit, runs_triton, tl, triton
from pi05_ros.engine.packed import ExpertWeights
from pi05_ros.engine.schedule import Schedule
from pi05_ros.model.gemma import MASKED, RMS_NORM_EPS, Rotary, normalize_rms

LAYER_PHASES = ("qkv", "attend", "combine", "out", "merge_attention", "gate_up", "down", "merge_mlp")

_EPS = tl.constexpr(RMS_NORM_EPS) if AVAILABLE else RMS_NORM_EPS
_COMBINE_ROWS = tl.constexpr(4) if AVAILABLE else 4


# ---- pieces ----


@jit
def _barrier(counter, arrivals, programs, ONLY: tl.constexpr):
    """Wait until all programs have come here; what each wrote before is seen by all after. -> arrivals so far.

    counter: int32, 0 at launch. All programs must be resident at once. A phase that is run alone needs no barrier.
    """
    if ONLY != "all":
        return arrivals
    arrivals += programs
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred p;
            .reg .u32 v;
            mov.u32 v, %tid.x;
            setp.ne.u32 p, v, 0;
            @p bra DONE;
            fence.acq_rel.gpu;
            red.relaxed.gpu.global.add.u32 [$1], 1;
        WAIT:
            ld.acquire.gpu.global.u32 v, [$1];
            setp.lt.u32 p, v, $2;
            @p bra WAIT;
        DONE:
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,~{memory}",
        [counter, arrivals],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
    return arrivals


@jit
def _here(ONLY: tl.constexpr):
    """This program's number, read anew: what is computed from it is not carried through all loops in registers."""
    if ONLY == "all":
        return tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return tl.program_id(0)


@jit
def _prefetch(base, count: tl.constexpr, program, programs):
    """Have ``count`` elements from base on brought to the L2 cache; each program asks for its share."""
    lines: tl.constexpr = count * base.dtype.element_ty.primitive_bitwidth // 1024
    at_once: tl.constexpr = 256
    for first in range(program * at_once, lines, programs * at_once):
        line = tl.minimum(first + tl.arange(0, at_once), lines - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [base.to(tl.int64) + line.to(tl.int64) * 128],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def _product(
    a,
    lda,
    row,
    row_ok,
    w,
    ldw,
    col,
    begin,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """a[row, begin : begin + K] @ w[col, begin : begin + K].T, float32 [BM, BN]."""
    inner = begin + tl.arange(0, BK)
    accumulator = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        left = tl.load(a + row[:, None] * lda + (k + inner)[None, :], mask=row_ok[:, None], other=0.0)
        right = tl.load(w + col[:, None] * ldw + (k + inner)[None, :])
        accumulator = tl.dot(left, tl.trans(right), accumulator, input_precision="ieee")
    return accumulator


# ---- phases; each program takes every programs-th tile ----


@jit
def _start_rows(row, row_ok, x_t, w_in, b_in, modulation, x, h, A: tl.constexpr, W: tl.constexpr):
    """x = action_in(x_t) and its first norm. w_in: [A, W]. modulation: of the norm, [3, W]."""
    col = tl.arange(0, W)[None, :]
    y = tl.load(b_in + col).to(tl.float32)
    for a in tl.static_range(A):
        y += tl.load(x_t + row * A + a, mask=row_ok, other=0.0) * tl.load(w_in + a * W + col).to(tl.float32)
    tl.store(x + row * W + col, y, mask=row_ok)
    _store_norm(row, row_ok, y, modulation, h, W)


@jit
def _store_norm(row, row_ok, y, modulation, h, W: tl.constexpr):
    col = tl.arange(0, W)[None, :]
    y *= tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / W + _EPS)
    y = y * (1.0 + tl.load(modulation + col)) + tl.load(modulation + W + col)
    tl.store(h + row * W + col, y.to(h.dtype.element_ty), mask=row_ok)


@jit
def _merged_rows(row, row_ok, rows, parts, gate, x, PARTS: tl.constexpr, W: tl.constexpr):
    """x + gate * (the sum of all parts of a product)."""
    col = tl.arange(0, W)[None, :]
    before = tl.load(x + row * W + col, mask=row_ok, other=0.0)
    y = tl.load(parts + row * W + col, mask=row_ok, other=0.0)
    for part in tl.static_range(1, PARTS):
        y += tl.load(parts + (part * rows + row) * W + col, mask=row_ok, other=0.0)
    return before + y * tl.load(gate + col)


@jit
def _start(program, programs, rows, x_t, w_in, b_in, modulation, x, h, A: tl.constexpr, W: tl.constexpr):
    for first in range(program, rows, programs):
        row = first + tl.arange(0, 1)[:, None]
        _start_rows(row, row < rows, x_t, w_in, b_in, modulation, x, h, A, W)


@jit
def _merge(program, programs, rows, parts, modulation, x, h, PARTS: tl.constexpr, W: tl.constexpr,
           R: tl.constexpr):  # fmt: skip
    """modulation: [2, 3, W], of the norm whose gate the branch has, and of the norm that follows."""
    for first in range(program * R, rows, programs * R):
        row = first + tl.arange(0, R)[:, None]
        y = _merged_rows(row, row < rows, rows, parts, modulation + 2 * W, x, PARTS, W)
        tl.store(x + row * W + tl.arange(0, W)[None, :], y, mask=row < rows)
        _store_norm(row, row < rows, y, modulation + 3 * W, h, W)


@jit
def _finish(program, programs, rows, horizon, parts, modulation, next_modulation, x, h, x_t, w_in, b_in, w_out, b_out,
            previous, pull, max_weight, time, weight, dt, again, PARTS: tl.constexpr, A: tl.constexpr,
            W: tl.constexpr):  # fmt: skip
    """The velocity at x_t, guided by the previous chunk where pull is not 0 (model/rtc.py), and one Euler step."""
    block: tl.constexpr = 8 if A % 8 == 0 else 1
    col = tl.arange(0, W)
    for first_row in range(program, rows, programs):
        row = first_row + tl.arange(0, 1)[:, None]
        y = _merged_rows(row, row < rows, rows, parts, modulation + 2 * W, x, PARTS, W)
        _store_norm(row, row < rows, y, modulation + 3 * W, h, W)
        tl.debug_barrier()
        normed = tl.load(h + first_row * W + col).to(tl.float32)
        strength = tl.load(pull + first_row)
        bound = tl.minimum(weight, tl.load(max_weight + first_row // horizon))
        for first in tl.static_range(0, A, block):
            a = first + tl.arange(0, block)
            velocity = tl.sum(normed[None, :] * tl.load(w_out + a[:, None] * W + col[None, :]).to(tl.float32), 1)
            velocity += tl.load(b_out + a).to(tl.float32)
            at = tl.load(x_t + first_row * A + a)
            correction = (tl.load(previous + first_row * A + a) - (at - time * velocity)) * strength
            tl.store(x_t + first_row * A + a, at + dt * (velocity - bound * correction))
        if again:
            tl.debug_barrier()
            _start_rows(row, row < rows, x_t, w_in, b_in, next_modulation, x, h, A, W)


@jit
def _qkv_columns(tile, HEADS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    """Rows of Wqkv of a tile: 2 j is coordinate j of a head, 2 j + 1 what is rotated with it, D / 2 further."""
    tiles_per_head: tl.constexpr = D // BN
    head = tile % ((HEADS + 2) * tiles_per_head) // tiles_per_head
    within = tile % tiles_per_head * (BN // 2)
    pair = tl.arange(0, BN)
    return head, within, head * D + within + pair // 2 + pair % 2 * (D // 2)


@jit
def _qkv(program, programs, rows, horizon, h, w, cos, sin, lengths, q, keys, values, capacity, W: tl.constexpr,
         HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
         STAGES: tl.constexpr):  # fmt: skip
    half: tl.constexpr = BN // 2
    n_tiles: tl.constexpr = (HEADS + 2) * (D // BN)
    for tile in range(program, n_tiles * tl.cdiv(rows, BM), programs):
        head, within, col = _qkv_columns(tile, HEADS, D, BN)
        row = tile // n_tiles * BM + tl.arange(0, BM)
        row_ok = row < rows
        j = within + tl.arange(0, half)
        sample = row // horizon
        position = tl.load(lengths + sample, mask=row_ok, other=0) + row % horizon
        angle = position[:, None] * (D // 2) + j[None, :]
        rotated = (row_ok & (row * 0 + head <= HEADS))[:, None]  # queries and the key are, the value is not
        c = tl.load(cos + angle, mask=rotated, other=1.0)
        s = tl.load(sin + angle, mask=rotated, other=0.0)
        product = _product(h, W, row, row_ok, w, W, col, 0, W, BM, BN, BK, STAGES)
        first, second = tl.split(tl.reshape(product, (BM, half, 2)))
        cached = (sample * capacity + position)[:, None] * D + j[None, :]
        if head < HEADS:
            target = q + (row * HEADS + head)[:, None] * D + j[None, :]
        elif head == HEADS:
            target = keys + cached
        else:
            target = values + cached
        tl.store(target, (first * c - second * s).to(q.dtype.element_ty), mask=row_ok[:, None])
        tl.store(target + D // 2, (second * c + first * s).to(q.dtype.element_ty), mask=row_ok[:, None])


@jit
def _attend(program, programs, rows, horizon, q, keys, values, lengths, capacity, stretches, part, part_max, part_sum,
            HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, BQ: tl.constexpr, KEYS: tl.constexpr,
            BKEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Every query row of a sample (all heads share keys and values) against one stretch of KEYS keys."""
    query_rows = horizon * HEADS
    blocks = tl.cdiv(query_rows, BQ)
    d = tl.arange(0, D)[None, :]
    for tile in range(program, rows // horizon * blocks * stretches, programs):
        stretch = tile % stretches
        sample = tile // stretches // blocks
        query = tile // stretches % blocks * BQ + tl.arange(0, BQ)
        query_ok = query < query_rows
        query += sample * query_rows
        queries = tl.load(q + query[:, None] * D + d, mask=query_ok[:, None], other=0.0)
        end = tl.minimum((stretch + 1) * KEYS, tl.load(lengths + sample) + horizon)
        largest = tl.full((BQ,), -1.0e30, tl.float32)
        total = tl.zeros((BQ,), tl.float32)
        attended = tl.zeros((BQ, D), tl.float32)
        for first in tl.range(stretch * KEYS, end, BKEYS, num_stages=STAGES):
            key = first + tl.arange(0, BKEYS)
            cached = (sample * capacity + key)[:, None] * D + d
            k = tl.load(keys + cached, mask=(key < end)[:, None], other=0.0)
            v = tl.load(values + cached, mask=(key < end)[:, None], other=0.0)
            logits = tl.dot(queries, tl.trans(k), input_precision="ieee") * (SCALE * 1.4426950408889634)
            logits = tl.where((key < end)[None, :], logits, -1.0e30)
            larger = tl.maximum(largest, tl.max(logits, 1))
            p = tl.exp2(logits - larger[:, None])
            shrink = tl.exp2(largest - larger)
            attended = tl.dot(p.to(v.dtype), v, attended * shrink[:, None], input_precision="ieee")
            total = total * shrink + tl.sum(p, 1)
            largest = larger
        at = stretch * rows * HEADS + query
        tl.store(part + at[:, None] * D + d, attended, mask=query_ok[:, None])
        tl.store(part_max + at, largest, mask=query_ok)
        tl.store(part_sum + at, total, mask=query_ok)


@jit
def _combine(program, programs, rows, part, part_max, part_sum, stretches, attended, HEADS: tl.constexpr,
             D: tl.constexpr, STRETCHES: tl.constexpr):  # fmt: skip
    """STRETCHES: a power of two that bounds stretches; unrolled, so that all loads are under way at once."""
    query_rows = rows * HEADS
    d = tl.arange(0, D)[None, :]
    for first in range(program * _COMBINE_ROWS, query_rows, programs * _COMBINE_ROWS):
        query = first + tl.arange(0, _COMBINE_ROWS)
        stretch = tl.arange(0, STRETCHES)[:, None]
        there = (stretch < stretches) & (query < query_rows)[None, :]
        at = stretch * query_rows + query[None, :]
        m = tl.load(part_max + at, mask=there, other=-1.0e30)
        total = tl.load(part_sum + at, mask=there, other=0.0)
        largest = tl.max(m, 0)
        total = tl.sum(total * tl.exp2(m - largest[None, :]), 0)
        y = tl.zeros((_COMBINE_ROWS, D), tl.float32)
        for one in tl.static_range(STRETCHES):
            ok = (query < query_rows) & (query * 0 + one < stretches)
            at_one = one * query_rows + query
            share = tl.exp2(tl.load(part_max + at_one, mask=ok, other=-1.0e30) - largest)
            y += share[:, None] * tl.load(part + at_one[:, None] * D + d, mask=ok[:, None], other=0.0)
        y /= total[:, None]
        tl.store(attended + query[:, None] * D + d, y.to(attended.dtype.element_ty), mask=(query < query_rows)[:, None])


@jit
def _split_product(program, programs, rows, a, w, parts, K: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """parts[p] = a @ w.T over the p-th stretch of K inputs: float32 [PARTS, rows, W]."""
    n_tiles: tl.constexpr = W // BN
    stretch: tl.constexpr = K // PARTS
    for tile in range(program, n_tiles * PARTS * tl.cdiv(rows, BM), programs):
        col = tile % n_tiles * BN + tl.arange(0, BN)
        part = tile // n_tiles % PARTS
        row = tile // (n_tiles * PARTS) * BM + tl.arange(0, BM)
        row_ok = row < rows
        y = _product(a, K, row, row_ok, w, K, col, part * stretch, stretch, BM, BN, BK, STAGES)
        tl.store(parts + (part * rows + row)[:, None] * W + col[None, :], y, mask=row_ok[:, None])


@jit
def _gate_up_columns(tile, F: tl.constexpr, BN: tl.constexpr):
    """Rows of Wgate and Wup of a tile: 2 j is gate j, 2 j + 1 is up j."""
    first = tile % (F // (BN // 2)) * (BN // 2)
    pair = tl.arange(0, BN)
    return first, first + pair // 2 + pair % 2 * F


@jit
def _gate_up(program, programs, rows, h, w, hidden, W: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    half: tl.constexpr = BN // 2
    n_tiles: tl.constexpr = F // half
    for tile in range(program, n_tiles * tl.cdiv(rows, BM), programs):
        first, col = _gate_up_columns(tile, F, BN)
        row = tile // n_tiles * BM + tl.arange(0, BM)
        row_ok = row < rows
        product = _product(h, W, row, row_ok, w, W, col, 0, W, BM, BN, BK, STAGES)
        gate, up = tl.split(tl.reshape(product, (BM, half, 2)))
        y = (gelu_tanh(gate) * up).to(hidden.dtype.element_ty)
        tl.store(hidden + row[:, None] * F + (first + tl.arange(0, half))[None, :], y, mask=row_ok[:, None])


@jit
def _denoise(
    # what a request brings, float32 but lengths: [B, H, A], [B], [B, H, A], [B, H], [B]
    x_t, lengths, previous, pull, max_weight,
    # the prefix: [layers, B, capacity, D] each
    keys, values,
    # weights, see ExpertWeights; the schedule, see Schedule
    w_qkv, w_out, w_gate_up, w_down, action_in, action_in_bias, action_out, action_out_bias,
    modulations, times, guidance, dt, cos, sin,
    # scratch, see DenoiseBuffers
    x, h, q, attended, hidden, parts, part, part_max, part_sum, counter,
    # sizes
    rows, horizon, capacity, stretches, first_step, end_step, steps, first_layer, end_layer,
    LAYERS: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, F: tl.constexpr, A: tl.constexpr,
    # how it is done
    ONLY: tl.constexpr, PREFETCH: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BN_PARTS: tl.constexpr, BN_GATE: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, KEYS: tl.constexpr,
    BKEYS: tl.constexpr, STRETCHES: tl.constexpr, BROWS: tl.constexpr, STAGES: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """ONLY: "all", or the one phase to run, of step first_step and layer first_layer."""
    programs = tl.num_programs(0)
    arrivals = 0
    norm: tl.constexpr = 3 * W  # one norm's scale, shift and gate
    heads_width: tl.constexpr = HEADS * D
    qkv_size: tl.constexpr = (HEADS + 2) * D * W
    out_size: tl.constexpr = HEADS * D * W
    if ONLY == "all" or ONLY == "start":
        _start(_here(ONLY), programs, rows, x_t, action_in, action_in_bias, modulations, x, h, A, W)
    for step in range(first_step, end_step):
        modulation = modulations + step * (2 * LAYERS + 1) * norm
        for layer in range(first_layer, end_layer):
            cached = layer * (rows // horizon) * capacity * D
            arrivals = _barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "qkv":
                _qkv(_here(ONLY), programs, rows, horizon, h, w_qkv + layer * qkv_size, cos, sin, lengths, q,
                     keys + cached, values + cached, capacity, W, HEADS, D, BM, BN, BK, STAGES)  # fmt: skip
            if PREFETCH:
                _prefetch(w_gate_up + layer * (2 * F * W), 2 * F * W, _here(ONLY), programs)
            arrivals = _barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "attend":
                _attend(_here(ONLY), programs, rows, horizon, q, keys + cached, values + cached, lengths, capacity,
                        stretches, part, part_max, part_sum, HEADS, D, SCALE, BQ, KEYS, BKEYS, STAGES)  # fmt: skip
            arrivals = _barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "combine":
                _combine(_here(ONLY), programs, rows, part, part_max, part_sum, stretches, attended, HEADS, D,
                         STRETCHES)  # fmt: skip
            arrivals = _barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "out":
                _split_product(_here(ONLY), programs, rows, attended, w_out + layer * out_size, parts, heads_width, W,
                               PARTS, BM, BN_PARTS, BK, STAGES)  # fmt: skip
            if PREFETCH:
                _prefetch(w_down + layer * (F * W), F * W, _here(ONLY), programs)
            arrivals = _barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "merge_attention":
                _merge(_here(ONLY), programs, rows, parts, modulation + 2 * layer * norm, x, h, PARTS, W,
                       BROWS)  # fmt: skip
            arrivals = _barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "gate_up":
                _gate_up(_here(ONLY), programs, rows, h, w_gate_up + layer * (2 * F * W), hidden, W, F, BM, BN_GATE,
                         BK, STAGES)  # fmt: skip
            if PREFETCH:
                following = (layer + 1) % LAYERS
                _prefetch(w_qkv + following * qkv_size, qkv_size, _here(ONLY), programs)
                _prefetch(w_out + following * out_size, out_size, _here(ONLY), programs)
            arrivals = _barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "down":
                _split_product(_here(ONLY), programs, rows, hidden, w_down + layer * (F * W), parts, F, W, PARTS, BM,
                               BN_PARTS, BK, STAGES)  # fmt: skip
            arrivals = _barrier(counter, arrivals, programs, ONLY)
            if (ONLY == "all" or ONLY == "merge_mlp") and layer < LAYERS - 1:
                _merge(_here(ONLY), programs, rows, parts, modulation + (2 * layer + 1) * norm, x, h, PARTS, W,
                       BROWS)  # fmt: skip
        if ONLY == "all" or ONLY == "finish":
            _finish(_here(ONLY), programs, rows, horizon, parts, modulation + (2 * LAYERS - 1) * norm,
                    modulation + (2 * LAYERS + 1) * norm, x, h, x_t, action_in, action_in_bias, action_out,
                    action_out_bias, previous, pull, max_weight, tl.load(times + step), tl.load(guidance + step), dt,
                    step + 1 < steps, PARTS, A, W)  # fmt: skip


# ---- the launch ----


@dataclass(frozen=True)
class DenoiseInputs:
    """What a batch of requests brings to the flow, on the device. B batch, H horizon, A action_dim.

    x_t: float32 [B, H, A], the noise, which becomes the action chunk in place.
    lengths: int32 [B], positions of the prefix that count; the action tokens stand behind them.
    previous: float32 [B, H, A]; pull: float32 [B, H]; max_weight: float32 [B]: guidance, all 0 for none (model/rtc.py).
    """

    x_t: Tensor
    lengths: Tensor
    previous: Tensor
    pull: Tensor
    max_weight: Tensor


@dataclass(frozen=True)
class Tiling:
    """How the kernel cuts its products: rows, columns and inner length of a tile, stages of the pipeline, threads.

    parts: stretches of the inner dimension of the two products whose sum is taken afterwards. query_rows, keys: a tile
    of the attention.
    """

    rows: int = 64
    columns: int = 32
    part_columns: int = 64
    gate_columns: int = 64
    inner: int = 128
    parts: int = 8
    query_rows: int = 32
    keys: int = 128
    stages: int = 3
    warps: int = 8
    prefetch: bool = True
    block_rows: int = 1
    block_keys: int = 64

    @staticmethod
    def of(rows: int, dtype: torch.dtype, width: int, head_dim: int) -> Tiling:
        """For ``rows`` action tokens, activations of ``dtype``, an expert of ``width``."""
        if width < 256:  # test models
            return Tiling(16, 16, 16, 16, 16, 2, 16, 16, 1, 4, False, block_keys=16)
        if dtype == torch.float32:
            return Tiling(inner=32, keys=64, query_rows=16, block_keys=32)
        if rows <= 64:
            return Tiling()
        return Tiling(128, 64, 128, 128, query_rows=64, block_rows=2)


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
        tiling = Tiling.of(rows, dtype, width, head_dim)
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
            counter=scratch(1, dtype=torch.int32),
            tiling=tiling,
        )


def denoise(
    inputs: DenoiseInputs,
    keys: Tensor,
    values: Tensor,
    weights: ExpertWeights,
    schedule: Schedule,
    rope: tuple[Tensor, Tensor],
    buffers: DenoiseBuffers,
) -> None:
    """Run the flow, see denoise_triton; buffers are used on a GPU only."""
    if runs_triton(inputs.x_t):
        denoise_triton(inputs, keys, values, weights, schedule, rope, buffers)
    else:
        denoise_plain(inputs, keys, values, weights, schedule, rope)


def denoise_triton(
    inputs: DenoiseInputs,
    keys: Tensor,
    values: Tensor,
    weights: ExpertWeights,
    schedule: Schedule,
    rope: tuple[Tensor, Tensor],
    buffers: DenoiseBuffers,
) -> None:
    """Run the flow: inputs.x_t becomes the action chunk.

    keys, values: [layers, B, capacity, D], rows 0 to length - 1 from the prefix; the horizon's rows behind are written.
    rope: cos and sin, float32 [positions, D / 2] each, for every position that can occur.
    """
    if x_is_on_gpu := inputs.x_t.is_cuda:
        buffers.counter.zero_()
    layers, steps = weights.qkv.shape[0], schedule.steps
    launch = functools.partial(_launch, inputs, keys, values, weights, schedule, rope, buffers)
    if x_is_on_gpu:
        launch("all", (0, steps), (0, layers))
        return
    launch(
        "start", (0, 0), (0, 0)
    )  # Triton's interpreter runs one program after the other: no barrier can be waited at
    for step in range(steps):
        for layer in range(layers):
            for phase in LAYER_PHASES:
                launch(phase, (step, step + 1), (layer, layer + 1))
        launch("finish", (step, step + 1), (0, 0))


def _launch(
    inputs: DenoiseInputs,
    keys: Tensor,
    values: Tensor,
    weights: ExpertWeights,
    schedule: Schedule,
    rope: tuple[Tensor, Tensor],
    buffers: DenoiseBuffers,
    only: str,
    steps: tuple[int, int],
    layers: tuple[int, int],
) -> None:
    device, tiling = inputs.x_t.device, buffers.tiling
    batch, horizon, action_dim = inputs.x_t.shape
    count, _, capacity, head_dim = keys.shape
    width, heads_width, mlp = weights.out.shape[1], weights.out.shape[2], weights.down.shape[2]
    cooperative = {"launch_cooperative_grid": True} if only == "all" else {}
    _denoise[(_programs(device) if device.type == "cuda" else 3,)](
        inputs.x_t, inputs.lengths, inputs.previous, inputs.pull, inputs.max_weight, keys, values,
        weights.qkv, weights.out, weights.gate_up, weights.down,
        weights.action_in, weights.action_in_bias, weights.action_out, weights.action_out_bias,
        schedule.modulations, schedule.times, schedule.guidance, schedule.dt, rope[0], rope[1],
        buffers.x, buffers.h, buffers.q, buffers.attended, buffers.hidden, buffers.parts,
        buffers.part, buffers.part_max, buffers.part_sum, buffers.counter,
        batch * horizon, horizon, capacity, buffers.part.shape[0], steps[0], steps[1], schedule.steps,
        layers[0], layers[1],
        LAYERS=count, W=width, HEADS=heads_width // head_dim, D=head_dim, F=mlp, A=action_dim,
        ONLY=only, PREFETCH=tiling.prefetch, PARTS=tiling.parts, BM=tiling.rows, BN=tiling.columns,
        BN_PARTS=tiling.part_columns, BN_GATE=tiling.gate_columns, BK=tiling.inner, BQ=tiling.query_rows,
        KEYS=tiling.keys, BKEYS=tiling.block_keys, STRETCHES=triton.next_power_of_2(buffers.part.shape[0]),
        BROWS=tiling.block_rows, STAGES=tiling.stages, SCALE=head_dim**-0.5, num_warps=tiling.warps, num_stages=1,
        **cooperative,
    )  # fmt: skip


@functools.cache
def _programs(device: torch.device) -> int:
    """One a multiprocessor: all resident at once, as the barrier needs."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def denoise_plain(
    inputs: DenoiseInputs,
    keys: Tensor,
    values: Tensor,
    weights: ExpertWeights,
    schedule: Schedule,
    rope: tuple[Tensor, Tensor],
) -> None:
    """The same in plain PyTorch, on the same weights."""
    horizon = inputs.x_t.shape[1]
    layers, _, capacity, head_dim = keys.shape
    heads = weights.out.shape[2] // head_dim
    positions = inputs.lengths[:, None] + torch.arange(horizon, device=keys.device)
    rows = positions[:, :, None].expand(-1, -1, head_dim).long()
    cos, sin = (table[positions][:, None] for table in rope)
    seen = torch.arange(capacity, device=keys.device) < inputs.lengths[:, None] + horizon
    bias = torch.where(seen, 0.0, MASKED)[:, None, None, :]
    unused = ~seen[:, :, None]  # what lies there may be anything, NaN as well

    def rotate(x: Tensor) -> Tensor:
        return Rotary(cos, sin).rotate(x.float()).to(keys.dtype)

    for step in range(schedule.steps):
        x = inputs.x_t @ weights.action_in.float() + weights.action_in_bias.float()
        for layer in range(layers):
            for index, branch in enumerate((weights.qkv, weights.gate_up)):
                scale, shift, gate = schedule.modulations[step, 2 * layer + index]
                h = F.linear((normalize_rms(x) * (1.0 + scale) + shift).to(keys.dtype), branch[layer])
                if index == 0:
                    q, k, v = h.unflatten(-1, (-1, head_dim)).transpose(1, 2).split((heads, 1, 1), dim=1)
                    keys[layer].scatter_(1, rows, rotate(k)[:, 0])
                    values[layer].scatter_(1, rows, v[:, 0])
                    q = rotate(q)
                    k, v = (cache[layer].masked_fill(unused, 0.0)[:, None] for cache in (keys, values))
                    attended = ((q @ k.mT).float() * head_dim**-0.5 + bias).softmax(-1).to(keys.dtype) @ v
                    y = F.linear(attended.transpose(1, 2).flatten(-2), weights.out[layer])
                else:
                    gated, up = h.chunk(2, dim=-1)
                    y = F.linear(F.gelu(gated, approximate="tanh") * up, weights.down[layer])
                x = x + y.float() * gate
        scale, shift, _ = schedule.modulations[step, 2 * layers]
        h = (normalize_rms(x) * (1.0 + scale) + shift).to(keys.dtype).float()
        velocity = F.linear(h, weights.action_out.float(), weights.action_out_bias.float())
        clean = inputs.x_t - schedule.times[step] * velocity
        bound = torch.minimum(schedule.guidance[step], inputs.max_weight)[:, None, None]
        velocity = velocity - bound * (inputs.previous - clean) * inputs.pull[:, :, None]
        inputs.x_t.add_(velocity, alpha=schedule.dt)
