"""What the benchmark runs and how it is timed: rows of one request kind each, and the errors of each engine.

Everything goes through ``Engine.submit``, as a caller would: uint8 images and token ids on the host in, actions on the
host out. One engine, and so one copy of the weights, is on the device at a time.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pi05_ros.checkpoint import load_model, random_model, read_checkpoint
from pi05_ros.checkpoint.making import PRESETS
from pi05_ros.engine import Engine, EngineRequest, EngineResult, make_path
from pi05_ros.engine.roofline import Ceilings, Workload, floors
from pi05_ros.errors import InferenceError
from pi05_ros.model import Pi05Config, Pi05Model, RtcGuidance

STAGES = ("preprocess", "vision", "prefix", "denoise")
MAX_BATCH = 8
PROBES = 4
"""Requests whose actions are compared, one seed each; also the batch of the batch comparison."""


@dataclass(frozen=True)
class Case:
    """A kind of request. image: height and width, None: the model's own size, which needs no resizing."""

    batch: int = 1
    cameras: int = 3
    prompt: int = 200
    image: tuple[int, int] | None = None
    hit: bool = False
    rtc: bool = False

    @property
    def name(self) -> str:
        """How it differs from the first row's."""
        words = {
            "batch": f"batch {self.batch}",
            "cameras": f"{self.cameras} camera{'s' if self.cameras > 1 else ''}",
            "prompt": f"prompt {self.prompt}",
            "image": "{}x{}".format(*(self.image or (0, 0))),
            "hit": "cache hit",
            "rtc": "RTC, identity Jacobian",
        }
        differing = [text for field, text in words.items() if getattr(self, field) != getattr(BASE, field)]
        return ", ".join(differing) or "base"


BASE = Case()
QUICK = (BASE, Case(batch=4), Case(hit=True))
FULL = (
    *(Case(batch=batch) for batch in (1, 2, 4, 8)),
    Case(hit=True),
    Case(rtc=True),
    Case(cameras=1),
    Case(cameras=2),
    Case(prompt=48),
    Case(image=(480, 640)),
)


@dataclass(frozen=True)
class Weights:
    """Where the network comes from. checkpoint: None for random weights made on the device."""

    name: str
    config: Pi05Config
    layout: str
    checkpoint: Path | None = None
    seed: int = 0

    @staticmethod
    def of(checkpoint: Path | None, preset: str, seed: int) -> Weights:
        """Of a checkpoint, or random ones of a preset. Raises CheckpointError."""
        if checkpoint is None:
            return Weights(f"Random weights ({preset}, seed {seed})", PRESETS[preset](), "lerobot", seed=seed)
        found = read_checkpoint(checkpoint, with_stats=False)
        return Weights(str(checkpoint), found.config, found.layout, checkpoint)

    def model(self, device: torch.device, precision: str) -> Pi05Model:
        if self.checkpoint is None:
            return random_model(self.config, device, precision, self.seed)
        return load_model(self.checkpoint, device, precision)


def model_precision(precision: str) -> str:
    """Precision of the weights that an engine of that precision starts from."""
    return "openpi" if precision == "fp8" else precision


def build_engine(model: Pi05Model, compile_mode: str, precision: str, layout: str = "lerobot") -> Engine:
    """An engine as a policy would have it, without batch delay: the benchmark's batches arrive at once.

    precision: "fp8", or any other for the model as it is. layout: whose resizing and time grid.
    """
    special = {"fp8": True} if precision == "fp8" else {}
    path = make_path(model, compile_mode, resize=layout, time_grid=layout, **special)
    return Engine(path, max_batch=MAX_BATCH, batch_delay=0.0)


@dataclass(frozen=True)
class Startup:
    """Seconds until an engine answers: its weights on the device, the engine built, the first request answered."""

    precision: str
    path: str
    weights: float
    engine: float
    first: float


@contextmanager
def running(
    weights: Weights, device: torch.device, compile_mode: str, precision: str, first: EngineRequest
) -> Iterator[tuple[Engine, Startup]]:
    """An engine that has the device for itself and has answered ``first``; its memory is free afterwards."""
    clock = [time.perf_counter()]
    models = [weights.model(device, model_precision(precision))]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    clock.append(time.perf_counter())
    engine = build_engine(models.pop(), compile_mode, precision, weights.layout)  # no name keeps the model alive
    try:
        clock.append(time.perf_counter())
        engine.submit(first).result()
        clock.append(time.perf_counter())
        yield engine, Startup(precision, engine.path.name, *(float(took) for took in np.diff(clock)))
    finally:
        engine.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Requests:
    """Random requests of a network, the same for the same seed."""

    def __init__(self, config: Pi05Config, num_steps: int, seed: int = 0) -> None:
        self.config, self.num_steps = config, num_steps
        self._random = np.random.default_rng(seed)

    def one(self, case: Case) -> EngineRequest:
        """A fresh one: other images, other prompt, other noise."""
        config, draw = self.config, self._random
        height, width = case.image or (config.vision.image_size,) * 2
        shape = (config.horizon, config.action_dim)
        return EngineRequest(
            images=tuple(draw.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(case.cameras)),
            tokens=draw.integers(0, config.prefix.vocab, case.prompt),
            noise=draw.standard_normal(shape, dtype=np.float32),
            num_steps=self.num_steps,
            rtc=RtcGuidance(torch.from_numpy(draw.standard_normal(shape, dtype=np.float32)), 4) if case.rtc else None,
            use_cache=case.hit,
        )

    def batch(self, case: Case) -> list[EngineRequest]:
        return [self.one(case) for _ in range(case.batch)]


@dataclass(frozen=True)
class Row:
    """A measured case. Times in ms, of the whole batch; memory in GiB (None without a GPU).

    stages: medians of what the engine says of itself. median, p95: from submission to the last result, by the caller's
    clock. floor: of the stages that ran. plain: median of the plain path in the same run, on weights of that precision.
    """

    precision: str
    path: str
    case: Case
    n: int
    stages: Mapping[str, float]
    median: float
    p95: float
    memory: float | None
    floor: float
    plain: float | None = None

    @property
    def per_request(self) -> float:
        return self.median / self.case.batch


def submit_together(engine: Engine, requests: list[EngineRequest]) -> tuple[list[EngineResult], float]:
    """Run requests as one batch -> results and ms from the first submission to the last result.

    Raises InferenceError if the engine does not run them as one.
    """
    began = time.perf_counter()
    with engine.together():
        futures = [engine.submit(request) for request in requests]
    results = [future.result() for future in futures]
    elapsed = (time.perf_counter() - began) * 1e3
    if any(result.batch_size != len(requests) for result in results):
        raise InferenceError(f"{len(requests)} requests that were submitted together did not run as one batch.")
    return results, elapsed


def measure(
    engine: Engine,
    precision: str,
    case: Case,
    requests: Requests,
    repeats: int,
    ceilings: Ceilings,
    warm_up: int = 3,
    plain: float | None = None,
) -> Row:
    """Time a case, with fresh inputs each time unless it is a cache hit. plain: see ``Row``.

    Raises InferenceError if it does not run as meant.
    """
    fixed = requests.batch(case)
    inputs: Callable[[], list[EngineRequest]] = (lambda: fixed) if case.hit else (lambda: requests.batch(case))
    for _ in range(max(warm_up, 1)):
        submit_together(engine, inputs())
    totals, stages = [], []
    for _ in range(repeats):
        results, elapsed = submit_together(engine, inputs())
        if any(result.prefix_cache_hit != case.hit for result in results):
            raise InferenceError(f"{case.name}: expected a cache {'hit' if case.hit else 'miss'}, got the other.")
        totals.append(elapsed)
        stages.append(results[0].timings)
    load = Workload(case.cameras, case.prompt, case.batch, requests.num_steps)
    floor = floors(requests.config, load, precision, ceilings)
    return Row(
        precision=precision,
        path=engine.path.name,
        case=case,
        n=repeats,
        stages={stage: statistics.median(timings.get(f"{stage}_ms", 0.0) for timings in stages) for stage in STAGES},
        median=statistics.median(totals),
        p95=float(np.percentile(totals, 95)),
        memory=torch.cuda.max_memory_reserved(engine.device) / 2**30 if engine.device.type == "cuda" else None,
        floor=floor["denoise"] if case.hit else sum(floor.values()),
        plain=plain,
    )


@dataclass(frozen=True)
class Probe:
    """An engine's actions for some requests [N, H, A], one by one and together; of the first [H, A], without and with
    its prefix cached.
    """

    single: np.ndarray
    together: np.ndarray
    miss: np.ndarray
    hit: np.ndarray


def probe(engine: Engine, requests: list[EngineRequest]) -> Probe:
    """Raises InferenceError if the cache or the batch does not come about."""
    engine.clear_cache()
    first = dataclasses.replace(requests[0], use_cache=True)
    miss, hit = (engine.submit(first).result() for _ in range(2))
    if miss.prefix_cache_hit or not hit.prefix_cache_hit:
        raise InferenceError("The second of two equal requests: expected a cache hit, got a miss.")
    together, _ = submit_together(engine, requests)
    return Probe(
        single=np.stack([engine.submit(request).result().model_actions for request in requests]),
        together=np.stack([result.model_actions for result in together]),
        miss=miss.model_actions,
        hit=hit.model_actions,
    )


@dataclass(frozen=True)
class Fidelity:
    """Differences of actions. error: relative to the float32 oracle, ||a - b|| / ||b||, by seed, None without oracle.

    hit_miss, graphs_eager: largest absolute difference (0: bit for bit); batch_single: relative, batch against one.
    """

    precision: str
    path: str
    error: tuple[float, ...] | None
    hit_miss: float
    batch_single: float
    graphs_eager: float | None


def fidelity(precision: str, path: str, ours: Probe, oracle: np.ndarray | None, eager: Probe | None) -> Fidelity:
    """oracle: actions [PROBES, H, A] of the float32 reference; eager: of the same engine, not captured."""
    return Fidelity(
        precision,
        path,
        None if oracle is None else tuple(relative_error(a, b) for a, b in zip(ours.single, oracle, strict=True)),
        hit_miss=float(np.abs(ours.hit - ours.miss).max()),
        batch_single=relative_error(ours.together, ours.single),
        graphs_eager=None if eager is None else float(np.abs(ours.single - eager.single).max()),
    )


def relative_error(actions: np.ndarray, reference: np.ndarray) -> float:
    """Frobenius norm of the difference, in that of the reference."""
    return float(np.linalg.norm(actions.astype(np.float64) - reference) / np.linalg.norm(reference.astype(np.float64)))
