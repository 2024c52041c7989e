"""What the strategies make of the same chunks: the commanded position across ten seams, and how much it jerks.

    python benchmarks/chunk_seams.py --plot seams.png

No robot and no checkpoint: one joint is to follow a slow reference, and chunks come from a small flow model whose
velocity is known exactly. Its chunks are smooth trajectories scattered about the reference (a Gaussian process of
--spread and --smoothness), so that each plans a little differently, as a policy does; it knows nothing of the
robot's state. They are denoised in ten steps and guided with the package's own guidance (model/rtc.py), and played
with its own player (robot/execution.py), on simulated time. Safety limits, which would round the seams off, are not
applied. All strategies get the same noise.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pi05_ros.model import RtcGuidance
from pi05_ros.model.rtc import Guide
from pi05_ros.robot.execution import STRATEGIES, ChunkPlayer

HZ, HORIZON, STEPS, SEAMS = 50, 50, 10, 10
PERIOD = 1_000_000_000 // HZ
AMPLITUDE, FREQUENCY = 0.5, 0.25  # rad, Hz of the reference
DECAY, EXECUTION_HORIZON = 0.01, 10  # the parameters' defaults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the positions into this file")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: 0)")
    parser.add_argument("--replan-steps", type=int, default=25, metavar="ROWS", help="as the parameter (default: 25)")
    parser.add_argument("--latency", type=float, default=0.12, metavar="S", help="of each chunk (default: 0.12)")
    parser.add_argument("--spread", type=float, default=0.05, metavar="RAD", help="about the reference (default: 0.05)")
    parser.add_argument("--smoothness", type=float, default=0.4, metavar="S", help="of that, in time (default: 0.4)")
    options = parser.parse_args()
    if not 0 <= options.latency <= 0.5 or not 1 <= options.replan_steps <= 25:
        parser.error("a chunk has a second: expected --latency 0 to 0.5 and --replan-steps 1 to 25")
    runs = {strategy: run(strategy, options) for strategy in STRATEGIES}
    print(table(runs))
    if options.plot:
        draw(runs, options.plot)


class Flow:
    """The flow from noise to trajectories: Gaussian, so its velocity is linear and exact. Rows are in radians."""

    def __init__(self, spread: float, smoothness: float) -> None:
        times = torch.arange(HORIZON, dtype=torch.float64)[:, None] / HZ
        distance = (times - times.T) / smoothness
        self._covariance = spread**2 * torch.exp(-(distance**2) / 2)

    def chunk(self, mean: np.ndarray, noise: torch.Tensor, guidance: RtcGuidance | None) -> np.ndarray:
        """Float64 [horizon] about that mean; noise: [1, horizon, 1]."""
        guide = None if guidance is None else Guide(guidance, noise)
        x, average = noise, torch.from_numpy(mean)[None, :, None]
        for step in range(STEPS):
            time = 1 - step / STEPS

            def velocity(x: torch.Tensor, time: float = time) -> torch.Tensor:
                return self._velocity(x, average, time)

            x = x - (velocity(x) if guide is None else guide.velocity(velocity, x, time)) / STEPS
        return x[0, :, 0].numpy()

    def _velocity(self, x: torch.Tensor, mean: torch.Tensor, time: float) -> torch.Tensor:
        """Of x = time * noise + (1 - time) * trajectory: the expected noise less the expected trajectory."""
        signal = (1 - time) * self._covariance
        total = time**2 * torch.eye(HORIZON, dtype=torch.float64) + (1 - time) * signal
        residual = torch.linalg.solve(total, x - (1 - time) * mean)
        return time * residual - (mean + signal @ residual)


@dataclass
class Run:
    """times: float64 [n], seconds; positions: commanded then, rad; seams: index of the first command of each chunk."""

    times: np.ndarray
    positions: np.ndarray
    seams: list[int]

    @property
    def jerk(self) -> np.ndarray:
        """Third difference, rad/s^3; element i is of the positions i to i + 3."""
        return np.diff(self.positions, 3) * HZ**3

    @property
    def at_seams(self) -> np.ndarray:
        """bool, of ``jerk``: the first position of a chunk is one of the four."""
        index = np.arange(len(self.positions) - 3)
        return np.any([(index <= seam) & (seam <= index + 3) for seam in self.seams], axis=0)


def run(strategy: str, options: argparse.Namespace) -> Run:
    """Play until a chunk after the last seam would be asked for."""
    rng, flow = torch.Generator().manual_seed(options.seed), Flow(options.spread, options.smoothness)
    player = ChunkPlayer(PERIOD, np.zeros(1, bool), ensemble_decay=DECAY if strategy == "ensemble" else None)
    latency = round(options.latency * HZ)  # in rows
    stamp, arrives = 0, 0  # of the chunk under way, in rows; the robot waits for the first
    guidance: RtcGuidance | None = None
    positions: list[float] = []
    seams: list[int] = []
    row = 0
    while True:
        if row == arrives:
            due = (stamp + 1 + np.arange(HORIZON)) / HZ
            noise = torch.randn(1, HORIZON, 1, generator=rng, dtype=torch.float64)
            chunk = flow.chunk(AMPLITUDE * np.sin(2 * np.pi * FREQUENCY * due), noise, guidance)
            player.play(chunk[:, None], stamp * PERIOD)
            if row:
                seams.append(row)
        setpoints = player.next(row * PERIOD, 1)
        assert setpoints is not None
        positions.append(float(setpoints.rows[0, 0]))
        row += 1
        if row > arrives and row == stamp + max(options.replan_steps, latency + 1):
            if len(seams) == SEAMS:
                break
            stamp, arrives = row, row + latency
            remaining = player.remaining(stamp * PERIOD)
            if strategy == "rtc" and remaining is not None:
                guidance = RtcGuidance(torch.from_numpy(remaining), latency, max(EXECUTION_HORIZON, 2 * latency))
    return Run(np.arange(1, row + 1) / HZ, np.array(positions), seams)


def table(runs: dict[str, Run]) -> str:
    """Markdown."""
    lines = [
        "| strategy | largest step at a seam (mrad) | largest step elsewhere (mrad) | RMS jerk at seams (rad/s^3) "
        "| RMS jerk elsewhere (rad/s^3) | largest jerk (rad/s^3) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for strategy, run in runs.items():
        step = 1e3 * np.abs(np.diff(run.positions))
        at_seam = np.isin(np.arange(1, len(run.positions)), run.seams)
        rms = [np.sqrt(np.mean(run.jerk[chosen] ** 2)) for chosen in (run.at_seams, ~run.at_seams)]
        lines.append(
            f"| {strategy} | {step[at_seam].max():.1f} | {step[~at_seam].max():.1f} | {rms[0]:.0f} | {rms[1]:.0f} "
            f"| {np.abs(run.jerk).max():.0f} |"
        )
    return "\n".join(lines)


def draw(runs: dict[str, Run], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(runs), 1, sharex=True, sharey=True)
    for axes, (strategy, run) in zip(rows, runs.items(), strict=True):
        for seam in run.seams:
            axes.axvline(run.times[seam], color="0.85", linewidth=1)
        reference = AMPLITUDE * np.sin(2 * np.pi * FREQUENCY * run.times)
        axes.plot(run.times, reference, color="0.6", linewidth=1, linestyle="--", label="reference")
        axes.plot(run.times, run.positions, color="tab:blue", linewidth=1.3, label="commanded")
        rms, largest = np.sqrt(np.mean(run.jerk**2)), np.abs(run.jerk).max()
        axes.set_title(f"{strategy}: jerk {rms:.0f} rad/s³ RMS, {largest:.0f} rad/s³ at most", loc="left")
        axes.set_ylabel("position (rad)")
    rows[0].legend(loc="upper right", ncols=2, frameon=False)
    rows[-1].set_xlabel("time (s); vertical lines: the first command of a new chunk")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
