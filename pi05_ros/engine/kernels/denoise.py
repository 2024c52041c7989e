"""All denoise steps of a chunk in one kernel launch.

The action expert reads 0.6 GB of weights a step and computes little with them: 50 rows. Launched as separate kernels it
is bound by launches and by the time each takes to fill the memory pipeline. Here one program per multiprocessor stays
for the whole flow and walks through the phases of every layer of every step; a barrier of all programs stands where a
phase needs what others wrote. The phases are in ``denoise_phases.py``.

Sums over stretches are taken in a fixed order: a chunk is the same bit by bit each time. A phase can also be run alone,
without a barrier, which is how Triton's interpreter does it: it runs one program after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pi05_ros.engine.kernels.denoise_buffers import DenoiseBuffers
from pi05_ros.engine.kernels.denoise_phases import (
    attend,
    barrier,
    combine,
    finish,
    gate_up,
    here,
    merge,
    modulation_of,
    qkv,
    rope_rows,
    split_product,
    start,
    whole_product,
)
from pi05_ros.engine.kernels.language import jit_for_any, runs_triton, tl, triton
from pi05_ros.engine.packed import ExpertWeights
from pi05_ros.engine.schedule import Schedule
from pi05_ros.model.gemma import MASKED, Rotary, normalize_rms

LAYER_PHASES = ("qkv", "attend", "combine", "out", "merge_attention", "gate_up", "down", "merge_mlp")
"""Where products are taken whole, the two merges are empty."""


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
class Flow:
    """The denoise steps of a batch. Running it makes inputs.x_t the action chunk.

    keys, values: [layers, B, capacity, D], rows 0 to length - 1 from the prefix; the horizon's rows behind are written.
    rope: cos and sin, float32 [positions, D / 2] each, for every position that can occur.
    """

    inputs: DenoiseInputs
    keys: Tensor
    values: Tensor
    weights: ExpertWeights
    schedule: Schedule
    rope: tuple[Tensor, Tensor]


@jit_for_any(
    "rows", "horizon", "capacity", "stretches", "stretch_keys", "first_step", "end_step", "steps", "first_layer",
    "end_layer",
)  # fmt: skip
def _denoise(
    # what a request brings, float32 but lengths: [B, H, A], [B], [B, H, A], [B, H], [B]
    x_t, lengths, previous, pull, max_weight,
    # the prefix: [layers, B, capacity, D] each
    keys, values,
    # weights, see ExpertWeights; the schedule, see Schedule
    w_qkv, w_out, w_gate_up, w_down, action_in, action_in_bias, action_out, action_out_bias,
    modulations, qkv_shifts, gate_up_shifts, times, guidance, dt, cos, sin,
    # scratch, see DenoiseBuffers
    x, h, q, attended, hidden, parts, squares, part, part_max, part_sum, row_cos, row_sin, counter,
    # sizes
    rows, horizon, width, out_inputs, down_inputs, capacity, stretches, stretch_keys, first_step, end_step, steps,
    first_layer, end_layer,
    LAYERS: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, F: tl.constexpr, A: tl.constexpr,
    # how it is done
    ONLY: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BN_GATE: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BN_PARTS: tl.constexpr, BK_PARTS: tl.constexpr,
    STAGES_PARTS: tl.constexpr, BQ: tl.constexpr, KEYS: tl.constexpr, BKEYS: tl.constexpr, ASTAGES: tl.constexpr,
    STRETCHES: tl.constexpr, MERGED: tl.constexpr, COMBINED: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """ONLY: "all", or the one phase to run, of step first_step and layer first_layer."""
    programs = tl.num_programs(0)
    arrivals = 0
    norm: tl.constexpr = 3 * W  # one norm's scale, shift and gate
    heads_width: tl.constexpr = HEADS * D
    qkv_size: tl.constexpr = (HEADS + 2) * D * W
    out_size: tl.constexpr = HEADS * D * W
    TILES: tl.constexpr = W // BN_PARTS if PARTS == 1 else 0  # of a row of squares
    # Keys that the program's first tile of attention may see; read here, because every layer needs it at once.
    sample = here(ONLY) // stretches // tl.cdiv(horizon * HEADS, BQ)
    first_count = tl.load(lengths + tl.minimum(sample, rows // horizon - 1)) + horizon
    if ONLY == "all" or ONLY == "start":
        rope_rows(here(ONLY), programs, rows, horizon, lengths, cos, sin, row_cos, row_sin, D // 2)
        start(here(ONLY), programs, rows, x_t, action_in, action_in_bias, modulations, x, h, squares, A, W, TILES)
    for step in range(first_step, end_step):
        modulation = modulations + step * (2 * LAYERS + 1) * norm
        for layer in range(first_layer, end_layer):
            cached = layer * (rows // horizon) * capacity * D
            arrivals = barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "qkv":
                qkv(here(ONLY), programs, rows, horizon, width, h, squares, w_qkv + layer * qkv_size,
                    qkv_shifts + (step * LAYERS + layer) * (HEADS + 2) * D, row_cos, row_sin, lengths, q, keys + cached,
                    values + cached, capacity, W, HEADS, D, TILES, BM, BN, BK, STAGES)  # fmt: skip
            arrivals = barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "attend":
                attend(here(ONLY), programs, rows, horizon, q, keys + cached, values + cached, lengths, first_count,
                       capacity, stretches, stretch_keys, part, part_max, part_sum, HEADS, D, SCALE, BQ, KEYS, BKEYS,
                       ASTAGES)  # fmt: skip
            arrivals = barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "combine":
                combine(here(ONLY), programs, rows, part, part_max, part_sum, stretches, attended, HEADS, D, STRETCHES,
                        COMBINED)  # fmt: skip
            arrivals = barrier(counter, arrivals, programs, ONLY)
            if PARTS == 1 and (ONLY == "all" or ONLY == "out"):
                whole_product(here(ONLY), programs, rows, out_inputs, attended, w_out + layer * out_size,
                              modulation + 2 * layer * norm, x, h, squares, heads_width, W, BM, BN_PARTS, BK_PARTS,
                              STAGES_PARTS)  # fmt: skip
            if PARTS > 1 and (ONLY == "all" or ONLY == "out"):
                split_product(here(ONLY), programs, rows, out_inputs, attended, w_out + layer * out_size, parts,
                              heads_width, W, PARTS, BM, BN_PARTS, BK_PARTS, STAGES_PARTS)  # fmt: skip
            if PARTS > 1 and (ONLY == "all" or ONLY == "merge_attention"):
                gate, scale, shift = modulation_of(modulation + 2 * layer * norm, W)
                arrivals = barrier(counter, arrivals, programs, ONLY)
                merge(here(ONLY), programs, rows, parts, x, h, gate, scale, shift, PARTS, W, MERGED)
            arrivals = barrier(counter, arrivals, programs, ONLY)
            if ONLY == "all" or ONLY == "gate_up":
                gate_up(here(ONLY), programs, rows, width, h, squares, w_gate_up + layer * (2 * F * W),
                        gate_up_shifts + (step * LAYERS + layer) * 2 * F, hidden, W, F, TILES, BM, BN_GATE, BK,
                        STAGES)  # fmt: skip
            arrivals = barrier(counter, arrivals, programs, ONLY)
            if PARTS == 1 and (ONLY == "all" or ONLY == "down"):
                whole_product(here(ONLY), programs, rows, down_inputs, hidden, w_down + layer * (F * W),
                              modulation + (2 * layer + 1) * norm, x, h, squares, F, W, BM, BN_PARTS, BK_PARTS,
                              STAGES_PARTS)  # fmt: skip
            if PARTS > 1 and (ONLY == "all" or ONLY == "down"):
                split_product(here(ONLY), programs, rows, down_inputs, hidden, w_down + layer * (F * W), parts, F, W,
                              PARTS, BM, BN_PARTS, BK_PARTS, STAGES_PARTS)  # fmt: skip
            if PARTS > 1 and (ONLY == "all" or ONLY == "merge_mlp"):
                gate, scale, shift = modulation_of(modulation + (2 * layer + 1) * norm, W)
                arrivals = barrier(counter, arrivals, programs, ONLY)
                if layer < LAYERS - 1:
                    merge(here(ONLY), programs, rows, parts, x, h, gate, scale, shift, PARTS, W, MERGED)
        if PARTS == 1:
            arrivals = barrier(counter, arrivals, programs, ONLY)
        if ONLY == "all" or ONLY == "finish":
            finish(here(ONLY), programs, rows, horizon, parts, modulation + (2 * LAYERS - 1) * norm,
                   modulation + (2 * LAYERS + 1) * norm, x, h, squares, x_t, action_in, action_in_bias, action_out,
                   action_out_bias, previous, pull, max_weight, tl.load(times + step), tl.load(guidance + step), dt,
                   step + 1 < steps, PARTS, A, W, TILES)  # fmt: skip


def denoise(flow: Flow, buffers: DenoiseBuffers) -> None:
    """Run a flow. The buffers are used on a GPU only."""
    if runs_triton(flow.keys):
        denoise_triton(flow, buffers)
    else:
        denoise_plain(flow)


def denoise_triton(flow: Flow, buffers: DenoiseBuffers) -> None:
    layers, steps = len(flow.keys), flow.schedule.steps
    launch = functools.partial(_launch, flow, buffers)
    if flow.keys.is_cuda:
        buffers.counter.zero_()
        launch("all", (0, steps), (0, layers))
        return
    launch("start", (0, 0), (0, 0))
    for step in range(steps):
        for layer in range(layers):
            for phase in LAYER_PHASES:
                launch(phase, (step, step + 1), (layer, layer + 1))
        launch("finish", (step, step + 1), (0, 0))


def _launch(flow: Flow, buffers: DenoiseBuffers, only: str, steps: tuple[int, int], layers: tuple[int, int]) -> None:
    inputs, weights, schedule, tiling = flow.inputs, flow.weights, flow.schedule, buffers.tiling
    batch, horizon, action_dim = inputs.x_t.shape
    count, _, capacity, head_dim = flow.keys.shape
    width, heads_width, mlp = weights.out.shape[1], weights.out.shape[2], weights.down.shape[2]
    stretches = len(buffers.part)
    cooperative = {"launch_cooperative_grid": True} if only == "all" else {}
    _denoise[(_programs(inputs.x_t.device),)](
        inputs.x_t, inputs.lengths, inputs.previous, inputs.pull, inputs.max_weight, flow.keys, flow.values,
        weights.qkv, weights.out, weights.gate_up, weights.down,
        weights.action_in, weights.action_in_bias, weights.action_out, weights.action_out_bias,
        schedule.modulations, schedule.qkv_shifts, schedule.gate_up_shifts,
        schedule.times, schedule.guidance, schedule.dt, *flow.rope,
        buffers.x, buffers.h, buffers.q, buffers.attended, buffers.hidden, buffers.parts, buffers.squares,
        buffers.part, buffers.part_max, buffers.part_sum, buffers.row_cos, buffers.row_sin, buffers.counter,
        batch * horizon, horizon, width, heads_width // tiling.parts, mlp // tiling.parts,
        capacity, stretches, tiling.keys, *steps, schedule.steps, *layers,
        LAYERS=count, W=width, HEADS=heads_width // head_dim, D=head_dim, F=mlp, A=action_dim,
        ONLY=only, PARTS=tiling.parts, BM=tiling.rows, BN=tiling.columns,
        BN_GATE=tiling.gate_columns, BK=tiling.inner, STAGES=tiling.stages,
        BN_PARTS=tiling.part_columns, BK_PARTS=tiling.part_inner, STAGES_PARTS=tiling.part_stages,
        BQ=tiling.query_rows, KEYS=tiling.keys, BKEYS=tiling.block_keys, ASTAGES=tiling.attention_stages,
        STRETCHES=triton.next_power_of_2(stretches), MERGED=tiling.merged_rows, COMBINED=tiling.combined_rows,
        SCALE=head_dim**-0.5, num_warps=tiling.warps, num_stages=1, **cooperative,
    )  # fmt: skip


@functools.cache
def _programs(device: torch.device) -> int:
    """One a multiprocessor: all resident at once, as the barrier needs. In the interpreter a few, in turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def denoise_plain(flow: Flow) -> None:
    """The same in plain PyTorch, on the same weights."""
    inputs, weights, schedule, dtype = flow.inputs, flow.weights, flow.schedule, flow.keys.dtype
    layers = len(flow.keys)
    attend = _Attention(flow)
    for step in range(schedule.steps):
        x = inputs.x_t @ weights.action_in.float() + weights.action_in_bias.float()
        for layer in range(layers):
            scale, shift, gate = schedule.modulations[step, 2 * layer]
            h = (normalize_rms(x) * (1.0 + scale) + shift).to(dtype)
            x = x + F.linear(attend(layer, F.linear(h, weights.qkv[layer])), weights.out[layer]).float() * gate
            scale, shift, gate = schedule.modulations[step, 2 * layer + 1]
            h = (normalize_rms(x) * (1.0 + scale) + shift).to(dtype)
            gated, up = F.linear(h, weights.gate_up[layer]).chunk(2, dim=-1)
            x = x + F.linear(F.gelu(gated, approximate="tanh") * up, weights.down[layer]).float() * gate
        scale, shift, _ = schedule.modulations[step, 2 * layers]
        h = (normalize_rms(x) * (1.0 + scale) + shift).to(dtype).float()
        velocity = F.linear(h, weights.action_out.float(), weights.action_out_bias.float())
        clean = inputs.x_t - schedule.times[step] * velocity
        bound = torch.minimum(schedule.guidance[step], inputs.max_weight)[:, None, None]
        velocity = velocity - bound * (inputs.previous - clean) * inputs.pull[:, :, None]
        inputs.x_t.add_(velocity, alpha=schedule.dt)


class _Attention:
    """Of the plain twin: a layer's fused queries, keys and values [B, H, ...] -> attended [B, H, heads * D]."""

    def __init__(self, flow: Flow) -> None:
        self._keys, self._values = flow.keys, flow.values
        _, _, capacity, head_dim = flow.keys.shape
        horizon, device = flow.inputs.x_t.shape[1], flow.keys.device
        positions = flow.inputs.lengths[:, None] + torch.arange(horizon, device=device)
        self._rows = positions[:, :, None].expand(-1, -1, head_dim).long()
        self._rope = Rotary(*(table[positions][:, None] for table in flow.rope))
        seen = torch.arange(capacity, device=device) < flow.inputs.lengths[:, None] + horizon
        self._bias = torch.where(seen, 0.0, MASKED)[:, None, None, :]
        self._unused = ~seen[:, :, None]  # what lies there may be anything, NaN as well

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        heads = qkv.unflatten(-1, (-1, keys.shape[-1])).transpose(1, 2)
        q, k, v = heads.split((heads.shape[1] - 2, 1, 1), dim=1)
        keys.scatter_(1, self._rows, self._rotate(k)[:, 0])
        values.scatter_(1, self._rows, v[:, 0])
        k, v = (cache.masked_fill(self._unused, 0.0)[:, None] for cache in (keys, values))
        logits = (self._rotate(q) @ k.mT).float() * keys.shape[-1] ** -0.5 + self._bias
        return (logits.softmax(-1).to(keys.dtype) @ v).transpose(1, 2).flatten(-2)

    def _rotate(self, x: Tensor) -> Tensor:
        return self._rope.rotate(x.float()).to(x.dtype)
