"""Time and memory of the plain path (the float32 oracle's code) at full size, with random weights.

    python benchmarks/plain_path.py --device cuda --precision openpi
    python benchmarks/plain_path.py --device cpu --precision openpi --repeats 1

Makes the checkpoint first (14.5 GB in float32) unless --checkpoint names one. One policy, three cameras of 480 x 640,
a prompt of 25 tokens, horizon 50, 10 denoise steps. "miss": new images every time; "hit": the prefix is cached.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from pi05_ros import Observation, Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.model import census

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")


def observation(rng: np.random.Generator) -> Observation:
    images = {name: rng.integers(0, 256, (480, 640, 3), dtype=np.uint8) for name in CAMERAS}
    return Observation(images, np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5] * 2), "pick up the red cube")


def measure(policy: Policy, repeats: int, hit: bool) -> dict[str, dict[str, float]]:
    """Median and largest milliseconds by stage."""
    rng = np.random.default_rng(0)
    fixed = observation(rng)
    policy.infer(fixed, seed=0)
    timings = [policy.infer(fixed if hit else observation(rng), seed=0).timings for _ in range(repeats)]
    return {
        stage: {"median": statistics.median(t[stage] for t in timings), "max": max(t[stage] for t in timings)}
        for stage in timings[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="folder of a checkpoint for an ALOHA (default: make a random one)")
    parser.add_argument("--preset", default="pi05_base", help="size of the random one: pi05_base or tiny")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1 or cpu")
    parser.add_argument("--precision", default="openpi", help="openpi, float32 or bfloat16")
    parser.add_argument("--repeats", type=int, default=20, help="requests measured for each row")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as temporary:
        began = time.monotonic()
        folder = Path(arguments.checkpoint or make_checkpoint(arguments.preset, temporary))
        made = time.monotonic()
        with Policy.from_checkpoint(
            folder, arguments.device, arguments.precision, robot="aloha_sim", compile_mode="plain"
        ) as policy:
            loaded = time.monotonic()
            cuda = policy.engine.device.type == "cuda"
            report = {
                "device": torch.cuda.get_device_name(policy.engine.device) if cuda else "cpu",
                "torch": torch.__version__,
                "precision": arguments.precision,
                "parameters": census(policy.engine.path.model),
                "make_s": round(made - began, 1),
                "load_s": round(loaded - made, 1),
                "miss_ms": measure(policy, arguments.repeats, hit=False),
                "hit_ms": measure(policy, arguments.repeats, hit=True),
                "repeats": arguments.repeats,
                "peak_device_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else 0.0,
                "peak_host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
            }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
