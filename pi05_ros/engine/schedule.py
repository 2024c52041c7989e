"""What depends on the denoise steps alone, and so is computed once for each number of steps.

The flow time reaches the action expert through its adaptive norms only. Their modulations at all steps (370 products of
a request's ten steps, and 226 MB of weights read at each of them) are a table here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pi05_ros.model import Pi05Model
from pi05_ros.model.gemma import ExpertLayer
from pi05_ros.model.pi05 import time_grid
from pi05_ros.model.rtc import guidance_weight


@dataclass(frozen=True)
class Schedule:
    """S steps, L layers, W expert width; all float32 on the device.

    modulations: [S, 2 L + 1, 3, W], scale, shift and gate of each norm in the order of their use.
    qkv_shifts: [S, L, (heads + 2) * D], gate_up_shifts: [S, L, 2 F]: what the shift of a layer's two norms becomes in
    the product that follows, for kernels that multiply before they normalise.
    times: [S], flow times as guidance uses them. guidance: [S], how strongly it may pull, unbounded.
    """

    steps: int
    modulations: Tensor
    qkv_shifts: Tensor
    gate_up_shifts: Tensor
    times: Tensor
    guidance: Tensor

    @property
    def dt(self) -> float:
        """Length of a step of the flow, which runs from 1 to 0."""
        return -1.0 / self.steps


@torch.no_grad()
def make_schedule(model: Pi05Model, steps: int, grid: str) -> Schedule:
    """The schedule of ``steps`` denoise steps; grid: dialect of ``model/pi05.py``. Raises ValueError as time_grid."""
    device = model.action_in_proj.weight.device
    layers = [layer for layer in model.expert.layers if isinstance(layer, ExpertLayer)]
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    condition = model.condition(time_grid(grid, steps).to(device))
    flat = [norm.dense(condition.to(norm.dense.weight.dtype)).float() for norm in (*norms, model.expert.norm)]
    modulations = torch.stack(flat, dim=1).unflatten(-1, (3, -1)).contiguous()
    shifts = modulations[:, :, 1].unbind(1)
    attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    qkv = [(one.q_proj, one.k_proj, one.v_proj) for one in attentions]
    gate_up = [(one.gate_proj, one.up_proj) for one in mlps]
    times = [1.0 + index * (-1.0 / steps) for index in range(steps)]  # rounded as in model/pi05.py
    return Schedule(
        steps,
        modulations,
        torch.stack([_through(*pair) for pair in zip(shifts[::2], qkv, strict=False)], dim=1),
        torch.stack([_through(*pair) for pair in zip(shifts[1::2], gate_up, strict=False)], dim=1),
        torch.tensor(times, dtype=torch.float32, device=device),
        torch.tensor([guidance_weight(time, float("inf")) for time in times], dtype=torch.float32, device=device),
    )


def _through(x: Tensor, products: Sequence[nn.Linear]) -> Tensor:
    """x [S, W], float32, multiplied with each of them, side by side."""
    return torch.cat([F.linear(x, one.weight.float()) for one in products], dim=-1)
