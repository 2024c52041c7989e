"""The phases of ``denoise.py``'s kernel, each a function of this program's number and of how many programs there are.

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

Where out and down are taken whole, they do what merge does but for the norm, which needs the whole row: h is x scaled
and not yet normalised, and qkv and gate_up multiply their results by 1 / rms(x) and add what the norm's shift becomes.

A phase takes every programs-th of its tiles. Nothing here knows of barriers but ``barrier``.
"""

from __future__ import annotations

from pi05_ros.engine.kernels.activations import gelu_tanh
from pi05_ros.engine.kernels.language import AVAILABLE, jit, tl
from pi05_ros.model.gemma import RMS_NORM_EPS

_EPS = tl.constexpr(RMS_NORM_EPS) if AVAILABLE else RMS_NORM_EPS


@jit
def barrier(counter, arrivals, programs, ONLY: tl.constexpr):
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
def here(ONLY: tl.constexpr):
    """This program's number, read anew: what is computed from it is not carried through all loops in registers."""
    if ONLY == "all":
        return tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return tl.program_id(0)


@jit
def tile_product(
    a,
    lda,
    row,
    row_ok,
    w,
    ldw,
    col,
    begin,
    count,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """a[row, begin : begin + count] @ w[col, begin : begin + count].T, float32 [BM, BN].

    The compiler must not know count, or it unrolls the loop: all phases of a layer run one after the other, and their
    code is to stay small enough for the instruction cache.
    """
    inner = begin + tl.arange(0, BK)
    accumulator = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, count, BK, num_stages=STAGES):
        left = tl.load(a + row[:, None] * lda + (k + inner)[None, :], mask=row_ok[:, None], other=0.0)
        right = tl.load(w + col[:, None] * ldw + (k + inner)[None, :])
        accumulator = tl.dot(left, tl.trans(right), accumulator, input_precision="ieee")
    return accumulator


@jit
def normed_product(h, squares, row, row_ok, w, shifts, col, count, W: tl.constexpr, TILES: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """norm(x)[row] @ w[col].T. TILES 0: h is norm(x). shifts: [N], the norm's shift @ w.T."""
    if TILES > 0:  # asked for before the product, used after it
        at = row[:, None] * TILES + tl.arange(0, TILES)[None, :]
        square = tl.sum(tl.load(squares + at, mask=row_ok[:, None], other=0.0), 1)
        shift = tl.load(shifts + col)
    product = tile_product(h, W, row, row_ok, w, W, col, 0, count, BM, BN, BK, STAGES)
    if TILES > 0:
        product = product * tl.rsqrt(square / W + _EPS)[:, None] + shift[None, :]
    return product


@jit
def start_rows(row, row_ok, x_t, w_in, b_in, modulation, x, h, squares, A: tl.constexpr, W: tl.constexpr,
               TILES: tl.constexpr):  # fmt: skip
    """x = action_in(x_t) and its first norm, or what stands for it (squares). w_in: [A, W]. modulation: [3, W]."""
    col = tl.arange(0, W)[None, :]
    y = tl.load(b_in + col).to(tl.float32)
    for a in tl.static_range(A):
        y += tl.load(x_t + row * A + a, mask=row_ok, other=0.0) * tl.load(w_in + a * W + col).to(tl.float32)
    tl.store(x + row * W + col, y, mask=row_ok)
    scale = tl.load(modulation + col)
    if TILES > 0:
        normed = y * (1.0 + scale)
        tile = tl.arange(0, TILES)[None, :]
        tl.store(squares + row * TILES + tile, tl.where(tile == 0, tl.sum(y * y, 1, keep_dims=True), 0.0), mask=row_ok)
    else:
        normed = rms_modulated(y, scale, tl.load(modulation + W + col), W)
    tl.store(h + row * W + col, normed.to(h.dtype.element_ty), mask=row_ok)


@jit
def rms_modulated(y, scale, shift, W: tl.constexpr):
    """y [R, W] by its RMS, modulated."""
    return y * tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / W + _EPS) * (1.0 + scale) + shift


@jit
def merged_rows(row, row_ok, rows, parts, gate, x, PARTS: tl.constexpr, W: tl.constexpr):
    """x + gate * (the sum of all parts of a product)."""
    col = tl.arange(0, W)[None, :]
    before = tl.load(x + row * W + col, mask=row_ok, other=0.0)
    y = tl.load(parts + row * W + col, mask=row_ok, other=0.0)
    for part in tl.static_range(1, PARTS):
        y += tl.load(parts + (part * rows + row) * W + col, mask=row_ok, other=0.0)
    return before + y * gate


@jit
def rope_rows(program, programs, rows, horizon, lengths, cos, sin, row_cos, row_sin, HALF: tl.constexpr):
    """Rotary embedding of the action tokens, which stand behind the prefix: float32 [M, D / 2] each."""
    j = tl.arange(0, HALF)
    for row in range(program, rows, programs):
        position = tl.load(lengths + row // horizon) + row % horizon
        tl.store(row_cos + row * HALF + j, tl.load(cos + position * HALF + j))
        tl.store(row_sin + row * HALF + j, tl.load(sin + position * HALF + j))


@jit
def start(program, programs, rows, x_t, w_in, b_in, modulation, x, h, squares, A: tl.constexpr, W: tl.constexpr,
          TILES: tl.constexpr):  # fmt: skip
    for first in range(program, rows, programs):
        row = first + tl.arange(0, 1)[:, None]
        start_rows(row, row < rows, x_t, w_in, b_in, modulation, x, h, squares, A, W, TILES)


@jit
def modulation_of(modulation, W: tl.constexpr):
    """gate of a norm's branch, scale and shift of the norm that follows. modulation: [2, 3, W], of both."""
    col = tl.arange(0, W)[None, :]
    gate = tl.load(modulation + 2 * W + col)
    return gate, tl.load(modulation + 3 * W + col), tl.load(modulation + 4 * W + col)


@jit
def merge(program, programs, rows, parts, x, h, gate, scale, shift, PARTS: tl.constexpr, W: tl.constexpr,
           R: tl.constexpr):  # fmt: skip
    """gate, scale, shift: see modulation_of; asked for ahead of the barrier, because nothing else is as cold."""
    col = tl.arange(0, W)[None, :]
    for first in range(program * R, rows, programs * R):
        row = first + tl.arange(0, R)[:, None]
        y = merged_rows(row, row < rows, rows, parts, gate, x, PARTS, W)
        tl.store(x + row * W + col, y, mask=row < rows)
        tl.store(h + row * W + col, rms_modulated(y, scale, shift, W).to(h.dtype.element_ty), mask=row < rows)


@jit
def finish(program, programs, rows, horizon, parts, modulation, next_modulation, x, h, squares, x_t, w_in, b_in, w_out,
            b_out, previous, pull, max_weight, time, weight, dt, again, PARTS: tl.constexpr, A: tl.constexpr,
            W: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The velocity at x_t, guided by the previous chunk where pull is not 0 (model/rtc.py), and one Euler step."""
    block: tl.constexpr = 16 if A % 16 == 0 else 1
    col = tl.arange(0, W)[None, :]
    for first_row in range(program, rows, programs):
        row = first_row + tl.arange(0, 1)[:, None]
        strength = tl.load(pull + first_row)
        bound = tl.minimum(weight, tl.load(max_weight + first_row // horizon))
        gate, scale, shift = modulation_of(modulation, W)
        y = tl.load(x + row * W + col) if TILES > 0 else merged_rows(row, row < rows, rows, parts, gate, x, PARTS, W)
        y = rms_modulated(y, scale, shift, W)
        y = y.to(h.dtype.element_ty).to(tl.float32)  # rounded as every norm's result
        for first in tl.static_range(0, A, block):
            a = first + tl.arange(0, block)
            at = tl.load(x_t + first_row * A + a)
            goal = tl.load(previous + first_row * A + a)
            velocity = tl.sum(y * tl.load(w_out + a[:, None] * W + col).to(tl.float32), 1)
            velocity += tl.load(b_out + a).to(tl.float32)
            correction = (goal - (at - time * velocity)) * strength
            tl.store(x_t + first_row * A + a, at + dt * (velocity - bound * correction))
        if again:
            tl.debug_barrier()
            start_rows(row, row < rows, x_t, w_in, b_in, next_modulation, x, h, squares, A, W, TILES)


@jit
def qkv_columns(tile, HEADS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    """Rows of Wqkv of a tile: 2 j is coordinate j of a head, 2 j + 1 what is rotated with it, D / 2 further."""
    tiles_per_head: tl.constexpr = D // BN
    head = tile % ((HEADS + 2) * tiles_per_head) // tiles_per_head
    within = tile % tiles_per_head * (BN // 2)
    pair = tl.arange(0, BN)
    return head, within, head * D + within + pair // 2 + pair % 2 * (D // 2)


@jit
def qkv(program, programs, rows, horizon, count, h, squares, w, shifts, row_cos, row_sin, lengths, q, keys, values,
        capacity, W: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr,
        BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    half: tl.constexpr = BN // 2
    n_tiles: tl.constexpr = (HEADS + 2) * (D // BN)
    for tile in range(program, n_tiles * tl.cdiv(rows, BM), programs):
        head, within, col = qkv_columns(tile, HEADS, D, BN)
        row = tile // n_tiles * BM + tl.arange(0, BM)
        row_ok = row < rows
        j = within + tl.arange(0, half)
        # Asked for before the product, used after it.
        rotated = (row_ok & (row * 0 + head <= HEADS))[:, None]  # queries and the key are, the value is not
        c = tl.load(row_cos + row[:, None] * (D // 2) + j[None, :], mask=rotated, other=1.0)
        s = tl.load(row_sin + row[:, None] * (D // 2) + j[None, :], mask=rotated, other=0.0)
        length = tl.load(lengths + row // horizon, mask=row_ok, other=0)
        product = normed_product(h, squares, row, row_ok, w, shifts, col, count, W, TILES, BM, BN, BK, STAGES)
        first, second = tl.split(tl.reshape(product, (BM, half, 2)))
        cached = (row // horizon * capacity + length + row % horizon)[:, None] * D + j[None, :]
        if head < HEADS:
            target = q + (row * HEADS + head)[:, None] * D + j[None, :]
        elif head == HEADS:
            target = keys + cached
        else:
            target = values + cached
        tl.store(target, (first * c - second * s).to(q.dtype.element_ty), mask=row_ok[:, None])
        tl.store(target + D // 2, (second * c + first * s).to(q.dtype.element_ty), mask=row_ok[:, None])


@jit
def attend(program, programs, rows, horizon, q, keys, values, lengths, first_count, capacity, stretches, stretch_keys,
            part, part_max,
            part_sum, HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, BQ: tl.constexpr,
            KEYS: tl.constexpr, BKEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
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
        count = first_count
        if tile != program:
            count = tl.load(lengths + sample) + horizon
        queries = tl.load(q + query[:, None] * D + d, mask=query_ok[:, None], other=0.0)
        largest = tl.full((BQ,), -1.0e30, tl.float32)
        total = tl.zeros((BQ,), tl.float32)
        attended = tl.zeros((BQ, D), tl.float32)
        for first in tl.range(0, stretch_keys, BKEYS, num_stages=STAGES if BKEYS < KEYS else 1):
            key = stretch * KEYS + first + tl.arange(0, BKEYS)
            cached = (sample * capacity + key)[:, None] * D + d
            k = tl.load(keys + cached, mask=(key < count)[:, None], other=0.0)
            v = tl.load(values + cached, mask=(key < count)[:, None], other=0.0)
            logits = tl.dot(queries, tl.trans(k), input_precision="ieee") * (SCALE * 1.4426950408889634)
            logits = tl.where((key < count)[None, :], logits, -1.0e30)
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
def combine(program, programs, rows, part, part_max, part_sum, stretches, attended, HEADS: tl.constexpr,
             D: tl.constexpr, STRETCHES: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """STRETCHES: a power of two that bounds stretches; unrolled, so that all loads are under way at once."""
    query_rows = rows * HEADS
    d = tl.arange(0, D)[None, :]
    for first in range(program * R, query_rows, programs * R):
        query = first + tl.arange(0, R)
        stretch = tl.arange(0, STRETCHES)[:, None]
        there = (stretch < stretches) & (query < query_rows)[None, :]
        at = stretch * query_rows + query[None, :]
        m = tl.load(part_max + at, mask=there, other=-1.0e30)
        total = tl.load(part_sum + at, mask=there, other=0.0)
        largest = tl.max(m, 0)
        total = tl.sum(total * tl.exp2(m - largest[None, :]), 0)
        y = tl.zeros((R, D), tl.float32)
        for one in tl.static_range(STRETCHES):
            ok = (query < query_rows) & (query * 0 + one < stretches)
            at_one = one * query_rows + query
            share = tl.exp2(tl.load(part_max + at_one, mask=ok, other=-1.0e30) - largest)
            y += share[:, None] * tl.load(part + at_one[:, None] * D + d, mask=ok[:, None], other=0.0)
        y /= total[:, None]
        tl.store(attended + query[:, None] * D + d, y.to(attended.dtype.element_ty), mask=(query < query_rows)[:, None])


@jit
def split_columns(tile, K: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr):
    """Rows of w of a tile, and the first of its inputs."""
    n_tiles: tl.constexpr = W // BN
    return tile % n_tiles * BN + tl.arange(0, BN), tile // n_tiles % PARTS * (K // PARTS)


@jit
def split_product(program, programs, rows, count, a, w, parts, K: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """parts[p] = a @ w.T over the p-th stretch of K inputs: float32 [PARTS, rows, W]."""
    n_tiles: tl.constexpr = W // BN
    for tile in range(program, n_tiles * PARTS * tl.cdiv(rows, BM), programs):
        col, begin = split_columns(tile, K, W, PARTS, BN)
        part = tile // n_tiles % PARTS
        row = tile // (n_tiles * PARTS) * BM + tl.arange(0, BM)
        row_ok = row < rows
        y = tile_product(a, K, row, row_ok, w, K, col, begin, count, BM, BN, BK, STAGES)
        tl.store(parts + (part * rows + row)[:, None] * W + col[None, :], y, mask=row_ok[:, None])


@jit
def whole_product(program, programs, rows, count, a, w, modulation, x, h, squares, K: tl.constexpr, W: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """x += gate * (a @ w.T), and what stands for the norm that follows. modulation: [2, 3, W], of both norms."""
    n_tiles: tl.constexpr = W // BN
    for tile in range(program, n_tiles * tl.cdiv(rows, BM), programs):
        col = tile % n_tiles * BN + tl.arange(0, BN)
        row = tile // n_tiles * BM + tl.arange(0, BM)
        row_ok = row < rows
        at, ok = row[:, None] * W + col[None, :], row_ok[:, None]
        gate, scale = tl.load(modulation + 2 * W + col)[None, :], tl.load(modulation + 3 * W + col)[None, :]
        before = tl.load(x + at, mask=ok, other=0.0)
        y = before + tile_product(a, K, row, row_ok, w, K, col, 0, count, BM, BN, BK, STAGES) * gate
        tl.store(x + at, y, mask=ok)
        tl.store(h + at, (y * (1.0 + scale)).to(h.dtype.element_ty), mask=ok)
        tl.store(squares + row * n_tiles + tile % n_tiles, tl.sum(y * y, 1), mask=row_ok)


@jit
def gate_up_columns(tile, F: tl.constexpr, BN: tl.constexpr):
    """Rows of Wgate and Wup of a tile: 2 j is gate j, 2 j + 1 is up j."""
    first = tile % (F // (BN // 2)) * (BN // 2)
    pair = tl.arange(0, BN)
    return first, first + pair // 2 + pair % 2 * F


@jit
def gate_up(program, programs, rows, count, h, squares, w, shifts, hidden, W: tl.constexpr, F: tl.constexpr,
            TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            STAGES: tl.constexpr):  # fmt: skip
    half: tl.constexpr = BN // 2
    n_tiles: tl.constexpr = F // half
    for tile in range(program, n_tiles * tl.cdiv(rows, BM), programs):
        first, col = gate_up_columns(tile, F, BN)
        row = tile // n_tiles * BM + tl.arange(0, BM)
        row_ok = row < rows
        product = normed_product(h, squares, row, row_ok, w, shifts, col, count, W, TILES, BM, BN, BK, STAGES)
        gate, up = tl.split(tl.reshape(product, (BM, half, 2)))
        y = (gelu_tanh(gate) * up).to(hidden.dtype.element_ty)
        tl.store(hidden + row[:, None] * F + (first + tl.arange(0, half))[None, :], y, mask=row_ok[:, None])
