"""What depends on the denoise steps alone, and so is computed once for each number of steps.

The flow time reaches the action expert through its adaptive norms only. Their modulations at all steps (370 products of
a request's ten steps, and 226 MB of weights read at each of them) are a table here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pi05_ros.model import Pi05Model
from pi05_ros.model.gemma import AdaptiveRMSNorm, ExpertLayer
from pi05_ros.model.pi05 import time_grid
from pi05_ros.model.rtc import guidance_weight


@dataclass(frozen=True)
class Schedule:
    """S steps, L layers, W expert width; all float32 on the device.

    modulations: [S, 2 L + 1, 3, W], scale, shift and gate of each norm in the order of their use.
    times: [S], flow times as guidance uses them. guidance: [S], how strongly it may pull, unbounded.
    """

    steps: int
    modulations: Tensor
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
    norms: list[AdaptiveRMSNorm] = []
    for layer in model.expert.layers:
        assert isinstance(layer, ExpertLayer)
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    norms.append(model.expert.norm)
    condition = model.condition(time_grid(grid, steps).to(device))
    modulations = torch.stack([norm.dense(condition.to(norm.dense.weight.dtype)).float() for norm in norms], dim=1)
    times = [1.0 + index * (-1.0 / steps) for index in range(steps)]  # rounded as in model/pi05.py
    return Schedule(
        steps,
        modulations.unflatten(-1, (3, -1)).contiguous(),
        torch.tensor(times, dtype=torch.float32, device=device),
        torch.tensor([guidance_weight(time, float("inf")) for time in times], dtype=torch.float32, device=device),
    )
