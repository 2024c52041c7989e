"""The one-launch flow against the model's own denoise loop. On a CPU its phases run in Triton's interpreter."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch

from pi05_ros.engine.kernels.denoise import DenoiseBuffers, DenoiseInputs, denoise_plain, denoise_triton
from pi05_ros.engine.packed import pack
from pi05_ros.engine.schedule import make_schedule
from pi05_ros.model import Pi05Config, Pi05Model, Prefix, RtcGuidance
from pi05_ros.model.gemma import rotary
from pi05_ros.model.rtc import Guide

STEPS = 2


@dataclass
class Case:
    model: Pi05Model
    prefixes: list[Prefix]
    noise: torch.Tensor
    rtc: RtcGuidance | None


def make_case(lengths: list[int], guided: bool) -> Case:
    torch.manual_seed(0)
    config = Pi05Config.tiny()
    model = Pi05Model(config).eval()
    with torch.no_grad():  # what is initialised to zero must matter as well
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        prefixes = []
        for length in lengths:
            kv = [torch.randn(config.prefix.layers, 1, 1, length, config.prefix.head_dim) for _ in range(2)]
            pad = torch.ones(1, length, dtype=torch.bool)
            prefixes.append(Prefix(torch.empty(0), pad, list(kv[0]), list(kv[1])))
    noise = torch.randn(len(lengths), config.horizon, config.action_dim)
    rtc = RtcGuidance(torch.randn(20, config.action_dim), 4, 12) if guided else None
    return Case(model, prefixes, noise, rtc)


def expected(case: Case) -> torch.Tensor:
    with torch.no_grad():
        rows = [
            case.model.denoise(prefix, case.noise[i : i + 1], STEPS, "lerobot", case.rtc)
            for i, prefix in enumerate(case.prefixes)
        ]
    return torch.cat(rows)


def run(case: Case, on_triton: bool) -> torch.Tensor:
    config, batch = case.model.config, len(case.prefixes)
    model = copy.deepcopy(case.model)
    weights, schedule = pack(model).expert, make_schedule(model, STEPS, "lerobot")
    lengths = torch.tensor([prefix.pad_mask.shape[1] for prefix in case.prefixes], dtype=torch.int32)
    capacity = int(lengths.max()) + config.horizon + 3
    shape = (config.prefix.layers, batch, capacity, config.prefix.head_dim)
    keys, values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))  # what is unused must not be read
    for i, prefix in enumerate(case.prefixes):
        keys[:, i, : lengths[i]] = torch.stack(prefix.keys)[:, 0, 0]
        values[:, i, : lengths[i]] = torch.stack(prefix.values)[:, 0, 0]
    previous, pull, max_weight = torch.zeros_like(case.noise), torch.zeros(case.noise.shape[:2]), torch.zeros(batch)
    if case.rtc is not None:
        guide = Guide(case.rtc, case.noise)
        previous, pull = guide.previous, guide.weights[..., 0].expand(batch, -1).contiguous()
        max_weight += case.rtc.max_guidance_weight
    inputs = DenoiseInputs(case.noise.clone(), lengths, previous, pull, max_weight)
    rope = rotary(torch.arange(capacity)[None], config.prefix.head_dim, torch.float32)
    tables = rope.cos[0, 0].contiguous(), rope.sin[0, 0].contiguous()
    if on_triton:
        buffers = DenoiseBuffers.allocate(weights, keys, config.horizon)
        for scratch in (buffers.x, buffers.h, buffers.q, buffers.parts, buffers.part, buffers.part_max):
            scratch.fill_(float("nan"))
        denoise_triton(inputs, keys, values, weights, schedule, tables, buffers)
    else:
        with torch.no_grad():
            denoise_plain(inputs, keys, values, weights, schedule, tables)
    return inputs.x_t


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("lengths", [[37], [16, 5]])
@pytest.mark.parametrize("on_triton", [False, True])
def test_equals_the_model(lengths, guided, on_triton):
    case = make_case(lengths, guided)
    torch.testing.assert_close(run(case, on_triton), expected(case), rtol=2e-5, atol=2e-5)
