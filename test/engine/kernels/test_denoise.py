"""The one-launch flow against its twin, and the twin against the model. On a CPU its phases run in the interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pi05_ros.checkpoint.random_weights import random_model
from pi05_ros.engine.kernels.denoise import DenoiseInputs, Flow, denoise_plain, denoise_triton
from pi05_ros.engine.kernels.denoise_buffers import DenoiseBuffers, Tiling
from pi05_ros.engine.packed import ExpertWeights, pack
from pi05_ros.engine.schedule import Schedule, make_schedule
from pi05_ros.model import ExpertConfig, Pi05Config, Pi05Model, Prefix, PrefixConfig, RtcGuidance
from pi05_ros.model.gemma import rotary
from pi05_ros.model.rtc import Guide

from .conftest import Place

LENGTHS = (37, 5)
"""Of the two prefixes. The second ends before the second stretch of keys begins."""
HORIZON, ACTION_DIM = 9, 8  # 18 rows are more than a block of 16; a chunk ends within it
Guidance = Sequence[RtcGuidance | None]


def guidance(delay: int, most: float = 10.0) -> RtcGuidance:
    """A previous chunk to be held to, shorter than a chunk and with fewer dimensions."""
    generator = torch.Generator().manual_seed(delay)
    return RtcGuidance(torch.randn(7, ACTION_DIM - 2, generator=generator), delay, 6, max_guidance_weight=most)


UNGUIDED: Guidance = (None, None)
GUIDED: Guidance = (guidance(2), guidance(4, most=1.5))
HALF_GUIDED: Guidance = (dataclasses.replace(guidance(0), execution_horizon=0), GUIDED[1])  # the first pulls nowhere


@dataclass(frozen=True)
class Case:
    """A network whose every phase has more tiles than the interpreter runs programs (3), and what it works on."""

    model: Pi05Model
    weights: ExpertWeights
    schedule: Schedule
    rope: tuple[Tensor, Tensor]
    prefix: Tensor  # [keys or values, layers, B, P, D]
    noise: Tensor

    @staticmethod
    def of(device: str, dtype: torch.dtype, action_dim: int = ACTION_DIM, steps: int = 2) -> Case:
        config = dataclasses.replace(
            Pi05Config.tiny(),
            prefix=PrefixConfig(width=16, layers=2, mlp=16, heads=2, kv_heads=1, head_dim=32, vocab=2),
            expert=ExpertConfig(width=32, mlp=64),
            horizon=HORIZON,
            action_dim=action_dim,
        )
        model = random_model(config, "cpu", "float32").to(device=device, dtype=dtype)
        table = rotary(torch.arange(max(LENGTHS) + HORIZON, device=device)[None], 32, torch.float32)
        torch.manual_seed(0)
        prefix = torch.randn(2, 2, len(LENGTHS), max(LENGTHS), 32).to(device=device, dtype=dtype)
        return Case(
            model,
            pack(model).expert,
            make_schedule(model, steps, "lerobot"),
            (table.cos[0, 0].contiguous(), table.sin[0, 0].contiguous()),
            prefix,
            torch.randn(len(LENGTHS), HORIZON, action_dim).to(device),
        )

    def model_says(self, rtc: Guidance) -> Tensor:
        """A sample alone, as the model denoises it."""
        rows = []
        for sample, length in enumerate(LENGTHS):
            keys, values = self.prefix[:, :, sample, None, None, :length]
            prefix = Prefix(torch.empty(0), torch.ones(1, length, dtype=torch.bool), list(keys), list(values))
            noise = self.noise[sample : sample + 1]
            rows.append(self.model.denoise(prefix, noise, self.schedule.steps, "lerobot", rtc[sample]))
        return torch.cat(rows)

    @torch.no_grad()
    def run(self, rtc: Guidance, *, on_triton: bool, parts: int = 2) -> Tensor:
        """What the kernel or its twin says of the batch. All memory that must not be read is NaN."""
        device, (_, layers, batch, positions, head_dim) = self.noise.device, self.prefix.shape
        lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        kv = self.prefix.new_full((2, layers, batch, positions + HORIZON, head_dim), torch.nan)
        for sample, length in enumerate(LENGTHS):
            kv[:, :, sample, :length] = self.prefix[:, :, sample, :length]
        noise = self.noise.clone()
        previous, pull = torch.zeros_like(noise), noise.new_zeros(noise.shape[:2])
        max_weight = noise.new_zeros(batch)
        for sample, one in enumerate(rtc):
            if one is not None:
                guide = Guide(one, noise[sample : sample + 1])
                previous[sample], pull[sample] = guide.previous[0], guide.weights[0, :, 0]
                max_weight[sample] = guide.max_weight
        inputs = DenoiseInputs(noise, lengths, previous, pull, max_weight)
        flow = Flow(inputs, *kv, self.weights, self.schedule, self.rope)
        if not on_triton:
            denoise_plain(flow)
            return inputs.x_t
        tiling = Tiling.of(0, kv.dtype, self.weights.out.shape[1], device)
        buffers = DenoiseBuffers.allocate(self.weights, kv[0], HORIZON, dataclasses.replace(tiling, parts=parts))
        for scratch in buffers.tensors:
            if scratch.is_floating_point():
                scratch.fill_(torch.nan)
        denoise_triton(flow, buffers)
        return inputs.x_t


@pytest.fixture(scope="module")
def exact() -> Case:
    return Case.of("cpu", torch.float32)


def assert_close(place: Place, actual: Tensor, expected: Tensor) -> None:
    """bfloat16 is rounded in other places of the two (attention, sums of stretches), at each of the layers."""
    tolerance = 2e-2 if place.dtype == torch.bfloat16 else 1e-5
    assert torch.isfinite(actual).all()
    assert torch.linalg.vector_norm(actual - expected) <= tolerance * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("rtc", [UNGUIDED, GUIDED, HALF_GUIDED], ids=["unguided", "guided", "half guided"])
def test_the_twin_equals_the_model(exact: Case, rtc: Guidance) -> None:
    torch.testing.assert_close(exact.run(rtc, on_triton=False), exact.model_says(rtc), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_kernel_equals_its_twin(place: Place, parts: int) -> None:
    flow = Case.of(place.device, place.dtype)
    half_guided, unguided = (flow.run(rtc, on_triton=True, parts=parts) for rtc in (HALF_GUIDED, UNGUIDED))
    assert_close(place, half_guided, flow.run(HALF_GUIDED, on_triton=False))
    assert_close(place, unguided, flow.run(UNGUIDED, on_triton=False))
    assert torch.equal(half_guided[0], unguided[0]), "no pull is no guidance, whatever happens to a neighbour"
    assert not torch.equal(half_guided[1], unguided[1])


def test_one_step_and_action_dims_that_fill_no_block(place: Place) -> None:
    flow = Case.of(place.device, place.dtype, action_dim=7, steps=1)
    assert_close(place, flow.run(GUIDED, on_triton=True), flow.run(GUIDED, on_triton=False))
