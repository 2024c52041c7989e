"""What is computed once for a number of steps is what the model computes at each of them."""

from __future__ import annotations

import pytest
import torch

from engine.small import TINY, tiny_model
from pi05_ros.engine.schedule import make_schedule
from pi05_ros.model.gemma import normalize_rms
from pi05_ros.model.pi05 import TIME_GRIDS, time_grid
from pi05_ros.model.rtc import guidance_weight


@pytest.mark.parametrize("grid", TIME_GRIDS)
@pytest.mark.parametrize("precision", ["float32", "openpi", "bfloat16"])
@pytest.mark.parametrize("steps", [1, 7])
@torch.no_grad()
def test_modulations_are_the_norms_own(precision: str, grid: str, steps: int) -> None:
    model = tiny_model(precision)
    norms = [norm for layer in model.expert.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms.append(model.expert.norm)
    schedule = make_schedule(model, steps, grid)
    width = TINY.expert.width
    assert schedule.modulations.shape == (steps, 2 * TINY.prefix.layers + 1, 3, width)
    assert (schedule.modulations.dtype, schedule.modulations.is_contiguous()) == (torch.float32, True)
    x = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0))
    # A product of many rows at once is summed in another order, which bfloat16 shows as one rounding.
    tolerance = 1e-5 if precision != "bfloat16" else 2e-2
    for index, time in enumerate(time_grid(grid, steps)):
        condition = model.condition(time[None])
        for norm, (scale, shift, gate) in zip(norms, schedule.modulations[index], strict=True):
            normed, own_gate = norm(x, condition)
            mine = normalize_rms(x) * (1.0 + scale) + shift
            torch.testing.assert_close(mine, normed, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(gate, own_gate[0, 0], rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_shifts_as_the_products_see_them() -> None:
    model = tiny_model()
    schedule = make_schedule(model, 3, "lerobot")
    for index, layer in enumerate(model.expert.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for shift, table, products in (
            (schedule.modulations[:, 2 * index, 1], schedule.qkv_shifts, ("q_proj", "k_proj", "v_proj")),
            (schedule.modulations[:, 2 * index + 1, 1], schedule.gate_up_shifts, ("gate_proj", "up_proj")),
        ):
            parts = [getattr(attention if "q_proj" in products else mlp, name)(shift) for name in products]
            torch.testing.assert_close(table[:, index], torch.cat(parts, dim=-1))


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_the_guidance_of_each_step(steps: int) -> None:
    schedule = make_schedule(tiny_model(), steps, "lerobot")
    assert (schedule.steps, schedule.dt) == (steps, -1.0 / steps)
    times = [1.0 - index / steps for index in range(steps)]
    assert schedule.times.tolist() == pytest.approx(times)
    for most in (0.5, 10.0, 1e6):
        bounded = schedule.guidance.clamp(max=most)
        assert bounded.tolist() == pytest.approx([guidance_weight(time, most) for time in times])


def test_no_steps() -> None:
    with pytest.raises(ValueError, match="num_steps: expected 1 or more, got 0"):
        make_schedule(tiny_model(), 0, "lerobot")
