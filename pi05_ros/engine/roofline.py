"""How fast one inference could be at best: work counted from the network's sizes, ceilings measured on the device.

A stage can end neither before its arithmetic at the rate of a large matrix product, nor before its bytes at the rate of
a device copy. The larger of the two is its floor, and the stages follow each other. Only what no engine can avoid is
counted: weights are read once a stage (once a denoise step), keys and values are written once and read once a step;
activations could stay on the chip. Work that the actions do not depend on is left out: the last prefix layer but for
its keys and values, and the time conditioning, which depends on the step schedule only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from pi05_ros.model import Pi05Config

STAGES = ("vision", "prefix", "denoise")
WORK_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
"""Dtype of the matrix products by the name that ceilings go by."""


@dataclass(frozen=True)
class Workload:
    """One inference of a batch of equal requests. images: the present cameras; prompt_tokens: without padding."""

    images: int = 3
    prompt_tokens: int = 200
    batch: int = 1
    num_steps: int = 10


@dataclass(frozen=True)
class Cost:
    """What a stage must do.

    gemm_flops, attention_flops: floating-point operations of products with weights, and within attention.
    weights: parameters that it reads, weight_reads: how many times. key_values: numbers written or read.
    """

    gemm_flops: int
    attention_flops: int
    weights: int
    weight_reads: int
    key_values: int

    @property
    def flops(self) -> int:
        return self.gemm_flops + self.attention_flops

    def bytes(self, weight_size: int, activation_size: int) -> int:
        """Bytes moved, given the size in bytes of a weight and of a key or value."""
        return self.weights * self.weight_reads * weight_size + self.key_values * activation_size


@dataclass(frozen=True)
class Ceilings:
    """Measured on the device: FLOP/s of a large matrix product by work type, bytes/s (read and written) of a copy."""

    flops: Mapping[str, float]
    bandwidth: float


def count(config: Pi05Config, load: Workload) -> dict[str, Cost]:
    """Stage -> what it must do for the whole batch."""
    return {"vision": _vision(config, load), "prefix": _prefix(config, load), "denoise": _denoise(config, load)}


def _vision(config: Pi05Config, load: Workload) -> Cost:
    vision = config.vision
    layers = vision.layers * (4 * vision.width**2 + 2 * vision.width * vision.mlp)
    ends = 3 * vision.patch_size**2 * vision.width + vision.width * config.prefix.width
    tokens = load.batch * load.images * vision.tokens
    attention = 4 * vision.tokens * vision.width * vision.layers  # every token sees those of its own image
    return Cost(2 * (layers + ends) * tokens, attention * tokens, layers + ends, 1, 0)


def _prefix(config: Pi05Config, load: Workload) -> Cost:
    prefix = config.prefix
    full = _attention_weights(config, prefix.width) + 3 * prefix.width * prefix.mlp
    weights = (prefix.layers - 1) * full + prefix.width * _key_value_width(config)
    length = _prefix_length(config, load)
    attention = 4 * length * prefix.heads * prefix.head_dim * (prefix.layers - 1)
    tokens = load.batch * length
    return Cost(2 * weights * tokens, attention * tokens, weights, 1, tokens * _key_value_width(config) * prefix.layers)


def _denoise(config: Pi05Config, load: Workload) -> Cost:
    prefix, expert = config.prefix, config.expert
    layer = _attention_weights(config, expert.width) + 3 * expert.width * expert.mlp
    weights = prefix.layers * layer + 2 * config.action_dim * expert.width
    keys = _prefix_length(config, load) + config.horizon
    attention = 4 * keys * prefix.heads * prefix.head_dim * prefix.layers
    tokens = load.batch * config.horizon * load.num_steps
    key_values = load.batch * keys * _key_value_width(config) * prefix.layers * load.num_steps
    return Cost(2 * weights * tokens, attention * tokens, weights, load.num_steps, key_values)


def _attention_weights(config: Pi05Config, width: int) -> int:
    """Query, key, value and output projection of a layer of that width."""
    return width * (2 * config.prefix.heads * config.prefix.head_dim + _key_value_width(config))


def _key_value_width(config: Pi05Config) -> int:
    return 2 * config.prefix.kv_heads * config.prefix.head_dim


def _prefix_length(config: Pi05Config, load: Workload) -> int:
    return load.images * config.vision.tokens + load.prompt_tokens


def floors(config: Pi05Config, load: Workload, precision: str, ceilings: Ceilings) -> dict[str, float]:
    """Stage -> the least milliseconds that this device needs for it.

    precision: of the engine; "openpi" counts as bfloat16 (its float32 islands are small), and "fp8" is fp8 products in
    the prefix, with bfloat16 attention, vision and action expert: what a chip could do with that stage in fp8, where
    the engine quantises its MLPs only (engine/packed.py). Raises KeyError: no ceiling of that kind was measured.
    """
    result = {}
    for stage, cost in count(config, load).items():
        wide = "float32" if precision == "float32" else "bfloat16"
        gemm = "fp8" if precision == "fp8" and stage == "prefix" else wide
        compute = cost.gemm_flops / ceilings.flops[gemm] + cost.attention_flops / ceilings.flops[wide]
        moved = cost.bytes(WORK_TYPES[gemm].itemsize, WORK_TYPES[wide].itemsize)
        result[stage] = max(compute, moved / ceilings.bandwidth) * 1e3
    return result


def has_fp8(device: torch.device) -> bool:
    """True if the device multiplies float8_e4m3 matrices (NVIDIA from compute capability 8.9)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def measure_ceilings(device: torch.device, precisions: set[str] | frozenset[str]) -> Ceilings:
    """Time large matrix products on random data (zeros would be faster) and a large copy; takes a second or two.

    precisions: of engines, as in ``floors``; decides which products are timed.
    """
    kinds = {"float32"} & precisions | ({"bfloat16"} if precisions - {"float32"} else set()) | {"fp8"} & precisions
    generator = torch.Generator(device).manual_seed(0)
    ceilings = Ceilings({kind: _product_rate(kind, device, generator) for kind in sorted(kinds)}, _copy_rate(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def _product_rate(kind: str, device: torch.device, generator: torch.Generator) -> float:
    """FLOP/s of a large square product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, generator=generator).to(WORK_TYPES[kind]) for _ in range(2))
    if kind == "fp8":
        one = torch.ones((), device=device)
        product: Callable[[], object] = partial(
            torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    else:
        product = partial(torch.matmul, a, b)
    return 2 * size**3 / _seconds(product, device)


def _copy_rate(device: torch.device) -> float:
    """Bytes/s of a copy far larger than any cache."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    return 2 * source.nbytes / _seconds(partial(torch.empty_like(source).copy_, source), device)


def _seconds(operation: Callable[[], object], device: torch.device, rounds: int = 3, repeats: int = 10) -> float:
    """Seconds of one operation, in the best of some rounds after a warm-up."""
    for _ in range(3):
        operation()
    best = float("inf")
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats):
            operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - began) / repeats)
    return best
