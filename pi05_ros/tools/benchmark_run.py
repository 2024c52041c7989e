"""One run of the benchmark: which engines are built in which order, and what of theirs is measured."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from pi05_ros.engine import Engine
from pi05_ros.engine.roofline import measure_ceilings
from pi05_ros.errors import CheckpointError
from pi05_ros.model import Pi05Model
from pi05_ros.tools.benchmark_rows import (
    BASE,
    FULL,
    PROBES,
    QUICK,
    Case,
    Fidelity,
    Probe,
    Requests,
    Row,
    Startup,
    Weights,
    fidelity,
    measure,
    model_precision,
    probe,
    running,
)
from pi05_ros.tools.benchmark_table import Report, environment

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """What to measure, and what was found so far. paths, precisions: in the order in which they run."""

    weights: Weights
    device: torch.device
    precisions: tuple[str, ...]
    paths: tuple[str, ...]
    quick: bool
    repeats: int
    num_steps: int
    seed: int
    with_error: bool
    rows: list[Row] = field(default_factory=list)
    startups: list[Startup] = field(default_factory=list)
    fidelities: list[Fidelity] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False

    def report(self) -> Report:
        """Run everything. What fails is noted and left out, the rest goes on."""
        say(f"{self.weights.name} on {self.device}: measuring the ceilings")
        self.ceilings = measure_ceilings(self.device, frozenset(self.precisions))
        draw = self._requests()
        self.probes = [draw.one(BASE) for _ in range(PROBES)]
        self.oracle = self._oracle() if self.with_error else None
        self.plain: dict[tuple[str, Case], float] = {}
        for precision in self.precisions:
            self._one_precision(precision)
        return Report(
            environment(self.device),
            self._setting(),
            self.ceilings,
            self.rows,
            self.startups,
            self.fidelities,
            self.notes,
            self.failed,
        )

    def _requests(self) -> Requests:
        return Requests(self.weights.config, self.num_steps, self.seed)

    def _engine(self, path: str, precision: str) -> AbstractContextManager[tuple[Engine, Startup]]:
        return running(self.weights, self.device, path, precision, self.probes[0])

    def _setting(self) -> str:
        config = self.weights.config
        size = config.vision.image_size
        return (
            f"{self.weights.name}. Unless a row says otherwise: batch 1, {BASE.cameras} cameras {size}x{size}, "
            f"{BASE.prompt} prompt tokens, {config.horizon} actions, {self.num_steps} denoise steps, fresh images each "
            "time, prefix cache off."
        )

    def _one_precision(self, precision: str) -> None:
        of_weights = model_precision(precision)
        eager: Probe | None = None
        for path in self.paths:
            if path == "plain" and (of_weights, BASE) in self.plain:
                continue  # fp8 has no plain path of its own; it starts from weights that were measured
            own = of_weights if path == "plain" else precision
            with self.tolerated(f"{own} {path}"), self._engine(path, own) as (engine, startup):
                if engine.path.name != path:
                    self.notes.append(f"{own} {path}: not here; the engine offers the {engine.path.name} path instead.")
                    continue
                self.startups.append(startup)
                self._measure(engine, own)
                if self.with_error:
                    probed = probe(engine, self.probes)
                    self.fidelities.append(
                        fidelity(own, path, probed, self.oracle, eager if path == "graphs" else None)
                    )
                    eager = probed if path == "eager" else eager

    def _measure(self, engine: Engine, precision: str) -> None:
        """All rows of an engine. The best path gets them all, and the plain path, which it is held against."""
        path = engine.path.name
        thorough = path in ("plain", self.paths[-1]) and not self.quick
        repeats, warm_up = (max(3, self.repeats // 10), 1) if path == "plain" else (self.repeats, 3)
        for case in FULL if thorough else QUICK:
            with self.tolerated(f"{precision} {path} {case.name}"):
                reference = self.plain.get((model_precision(precision), case))
                row = measure(engine, precision, case, self._requests(), repeats, self.ceilings, warm_up, reference)
                if path == "plain":
                    self.plain[precision, case] = row.median
                self.rows.append(row)
                say(f"{precision} {path} {case.name}: {row.median:.2f} ms, p95 {row.p95:.2f}")

    def _oracle(self) -> np.ndarray | None:
        """Actions of the float32 reference, [PROBES, H, A]; None, which is noted, if it does not fit the memory."""
        needed = 4 * _parameters(self.weights) + 2**31
        free = _free_memory(self.device)
        if free is not None and free < needed:
            self.notes.append(
                f"No errors against float32: it needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free."
            )
            return None
        say("float32 reference")
        with self.tolerated("float32 reference"), self._engine("plain", "float32") as (engine, _):
            return np.stack([engine.submit(request).result().model_actions for request in self.probes])
        return None

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """What fails inside is a note of the report, with its traceback in the log; memory may just not suffice."""
        try:
            yield
        except CheckpointError:  # every row would say the same
            raise
        except torch.cuda.OutOfMemoryError as error:
            self.notes.append(f"{what}: out of device memory: {str(error).splitlines()[0]}")
            say(self.notes[-1])
        except Exception as error:
            logger.exception("%s", what)
            self.notes.append(f"{what} FAILED: {type(error).__name__}: {error}")
            self.failed = True


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def _parameters(weights: Weights) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Pi05Model(weights.config).parameters())


def _free_memory(device: torch.device) -> int | None:
    """Bytes; None if this machine does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) * 1024 if match else None
