"""The roofline's arithmetic, against figures counted by hand and against PyTorch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pi05_ros.engine.roofline import Ceilings, Workload, count, floors, measure_ceilings
from pi05_ros.model import Pi05Config, Pi05Model

H200 = Ceilings({"bfloat16": 806e12, "fp8": 1518e12, "float32": 50e12}, bandwidth=4.27e12)


def test_work_of_pi05_base() -> None:
    costs = count(Pi05Config.pi05_base(), Workload())
    teraflops = {stage: cost.flops / 1e12 for stage, cost in costs.items()}
    assert teraflops == pytest.approx({"vision": 0.661, "prefix": 3.756, "denoise": 0.386}, rel=2e-3)
    weights = {stage: cost.weights * 2 / 1e9 for stage, cost in costs.items()}
    assert weights == pytest.approx({"vision": 0.82, "prefix": 3.74, "denoise": 0.62}, rel=2e-2)
    assert costs["denoise"].bytes(2, 2) / 1e9 == pytest.approx(6.42, rel=2e-3)
    short = count(Pi05Config.pi05_base(), Workload(prompt_tokens=48))["prefix"]
    assert short.flops / 1e12 == pytest.approx(3.149, rel=2e-3)


def test_floor_of_pi05_base() -> None:
    """Arithmetic bounds vision and prefix, bytes the denoise steps of one request."""
    config = Pi05Config.pi05_base()
    assert floors(config, Workload(), "openpi", H200) == pytest.approx(
        {"vision": 0.82, "prefix": 4.66, "denoise": 1.50}, rel=5e-3
    )
    assert sum(floors(config, Workload(batch=4), "bfloat16", H200).values()) == pytest.approx(23.8, rel=5e-3)
    openpi, fp8 = (floors(config, Workload(), precision, H200) for precision in ("openpi", "fp8"))
    assert fp8["prefix"] == pytest.approx(2.55, rel=5e-3)
    assert (fp8["vision"], fp8["denoise"]) == (openpi["vision"], openpi["denoise"])


@torch.no_grad()
def test_products_are_those_that_the_model_makes() -> None:
    """Of the reference model, which conditions on the time at every step; the roofline leaves that out."""
    config = Pi05Config.tiny()
    load = Workload(images=2, prompt_tokens=7, batch=3, num_steps=4)
    model = Pi05Model(config)
    images = torch.zeros(load.batch, load.images, 3, config.vision.image_size, config.vision.image_size)
    tokens = torch.zeros(load.batch, load.prompt_tokens, dtype=torch.int64)
    noise = torch.zeros(load.batch, config.horizon, config.action_dim)
    seen = {}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # others are not all counted
        prefix = model.encode_prefix(
            images, torch.ones(load.batch, load.images, dtype=torch.bool), tokens, torch.ones_like(tokens).bool()
        )
    seen["encode"] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        model.denoise(prefix, noise, load.num_steps)
    norms = 2 * config.prefix.layers + 1
    conditioning = 2 * load.batch * (2 + 3 * norms) * config.expert.width**2 * load.num_steps
    seen["denoise"] = counter.get_total_flops() - conditioning
    costs = count(config, load)
    assert seen == {"encode": costs["vision"].flops + costs["prefix"].flops, "denoise": costs["denoise"].flops}


def test_ceilings_are_measured_for_the_precisions_asked_for() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), {"openpi", "float32"})
    assert set(ceilings.flops) == {"bfloat16", "float32"}
    assert min(*ceilings.flops.values(), ceilings.bandwidth) > 0
    with pytest.raises(KeyError):
        floors(Pi05Config.tiny(), Workload(), "fp8", ceilings)
