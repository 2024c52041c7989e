"""Guided real-time chunking: a new chunk is pulled towards what is left of the previous one while it is denoised.

As in LeRobot (which follows arXiv:2506.07339 with an identity Jacobian); ``jacobian="vjp"`` is the paper's form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCHEDULES = ("ZEROS", "ONES", "LINEAR", "EXP")
JACOBIANS = ("identity", "vjp")


@dataclass(frozen=True)
class RtcGuidance:
    """What guides a chunk.

    prev_chunk: the not yet executed rows of the previous chunk, [T, A] or [B or 1, T, A] (tensor or array), normalised
        model space; A may be smaller than the model's action_dim (missing columns count as 0).
    inference_delay: rows that will have been executed when the new chunk arrives; they are fixed.
    execution_horizon: rows over which the pull fades out; cut to the length of prev_chunk. None: 10.
    schedule: how it fades: "ZEROS", "ONES", "LINEAR" or "EXP".
    max_guidance_weight: upper bound of the pull.
    jacobian: "identity" (LeRobot) or "vjp" (the paper; back-propagates through the expert at every step).

    Raises ValueError that names the field.
    """

    prev_chunk: Tensor
    inference_delay: int
    execution_horizon: int | None = None
    schedule: str = "LINEAR"
    max_guidance_weight: float = 10.0
    jacobian: str = "identity"

    def __post_init__(self) -> None:
        object.__setattr__(self, "prev_chunk", _own_copy(self.prev_chunk))
        for name, value, known in (
            ("schedule", self.schedule, SCHEDULES),
            ("jacobian", self.jacobian, JACOBIANS),
        ):
            if value not in known:
                raise ValueError(f"rtc.{name}: expected one of {', '.join(known)}, got {value!r}")
        if self.prev_chunk.dim() not in (2, 3) or 0 in self.prev_chunk.shape:
            raise ValueError(
                f"rtc.prev_chunk: expected [rows, dims] or [batch, rows, dims], got {list(self.prev_chunk.shape)}"
            )
        if not torch.isfinite(self.prev_chunk).all():
            raise ValueError("rtc.prev_chunk: expected finite numbers, got NaN or infinity")
        if not _is_count(self.inference_delay):
            raise ValueError(f"rtc.inference_delay: expected 0 or more rows, got {self.inference_delay!r}")
        if self.execution_horizon is not None and not _is_count(self.execution_horizon):
            raise ValueError(f"rtc.execution_horizon: expected 0 or more rows, got {self.execution_horizon!r}")
        weight = self.max_guidance_weight
        if not isinstance(weight, (int, float)) or not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"rtc.max_guidance_weight: expected a positive number, got {weight!r}")


def _own_copy(values: Any) -> Tensor:
    """float32, of the caller's values as they are now: what becomes of his buffer later is of no effect."""
    try:
        if isinstance(values, Tensor):
            return values.detach().to("cpu", torch.float32, copy=True)
        return torch.from_numpy(np.array(values, dtype=np.float32))
    except (TypeError, ValueError) as error:
        raise ValueError(f"rtc.prev_chunk: expected numbers [rows, dims]: {error}") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 0


DEFAULT_EXECUTION_HORIZON = 10


def prefix_weights(schedule: str, inference_delay: int, execution_horizon: int, horizon: int) -> Tensor:
    """How strongly each of the new chunk's rows is held to the previous chunk: float32 [horizon], 1 to 0."""
    end = min(execution_horizon, horizon)
    start = min(inference_delay, end)
    weights = torch.zeros(horizon, dtype=torch.float64)
    weights[:start] = 1.0
    if schedule == "ONES":
        weights[:end] = 1.0
    elif schedule in ("LINEAR", "EXP") and end > start:
        ramp = torch.linspace(1.0, 0.0, end - start + 2, dtype=torch.float64)[1:-1]
        weights[start:end] = ramp if schedule == "LINEAR" else ramp * torch.expm1(ramp) / math.expm1(1.0)
    return weights.float()


def guidance_weight(time: float, max_weight: float) -> float:
    """Strength of the pull at flow time ``time`` (1 is noise, 0 is the finished chunk)."""
    tau = 1.0 - time
    if tau <= 0.0 or time <= 0.0:
        return max_weight
    return min((time / tau) * (time**2 + tau**2) / time**2, max_weight)


class Guide:
    """One request's guidance, prepared once and applied at every denoise step."""

    def __init__(self, guidance: RtcGuidance, noise: Tensor) -> None:
        """noise: [B, H, A], for its shape, dtype and device. Raises ValueError if prev_chunk does not fit it."""
        batch, horizon, action_dim = noise.shape
        previous = guidance.prev_chunk.to(noise)
        if previous.dim() == 2:
            previous = previous[None]
        if previous.shape[0] not in (1, batch) or previous.shape[1] > horizon or previous.shape[2] > action_dim:
            raise ValueError(
                f"rtc.prev_chunk: expected at most [{batch}, {horizon}, {action_dim}], got {list(previous.shape)}"
            )
        rows = previous.shape[1]
        wanted = DEFAULT_EXECUTION_HORIZON if guidance.execution_horizon is None else guidance.execution_horizon
        weights = prefix_weights(guidance.schedule, guidance.inference_delay, min(wanted, rows), horizon)
        self.weights = weights.to(noise)[None, :, None]
        self.previous = torch.zeros_like(noise)
        self.previous[:, :rows, : previous.shape[2]] = previous
        self.max_weight = guidance.max_guidance_weight
        self.through_model = guidance.jacobian == "vjp"

    def velocity(self, velocity_of: Callable[[Tensor], Tensor], x: Tensor, time: float) -> Tensor:
        """The guided velocity at x [B, H, A] and flow time ``time``; velocity_of is the model's own."""
        if self.through_model:
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                velocity = velocity_of(x)
                clean = x - time * velocity
                error = ((self.previous - clean) * self.weights).detach()
                (correction,) = torch.autograd.grad(clean, x, error)
            velocity = velocity.detach()
        else:
            velocity = velocity_of(x)
            correction = (self.previous - (x - time * velocity)) * self.weights
        return velocity - guidance_weight(time, self.max_weight) * correction
