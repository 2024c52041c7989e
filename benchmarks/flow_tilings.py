"""Times the flow's kernel with other tiles than those of engine/kernels/denoise_buffers.py, on this machine's GPU.

    python benchmarks/flow_tilings.py --batch 1 --try stages=4 --try inner=128,stages=3

Without --try it changes one size at a time. The action expert has its full size and random weights; the prefix is
random keys and values of 968 positions. Each line: milliseconds of a captured flow of ten steps (median, largest, of
--repeats), the ratio to the shipped tiles in the same run, and the difference from the plain twin, relative, as a check
that the kernel still computes the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

import torch

from pi05_ros.checkpoint import random_model
from pi05_ros.engine.kernels.denoise import DenoiseInputs, Flow, denoise_plain, denoise_triton
from pi05_ros.engine.kernels.denoise_buffers import DenoiseBuffers, Tiling
from pi05_ros.engine.packed import pack
from pi05_ros.engine.schedule import make_schedule
from pi05_ros.model import Pi05Config
from pi05_ros.model.gemma import rotary

POSITIONS = 968
NEIGHBOURS = (
    {"stages": 5},
    {"inner": 64, "stages": 6},
    {"columns": 64},
    {"parts": 1, "part_columns": 16, "part_inner": 128, "part_stages": 8},
    {"parts": 1, "part_columns": 32, "part_inner": 128, "part_stages": 6},
    {"parts": 4, "part_columns": 32},
    {"part_inner": 128, "part_stages": 4},
    {"query_rows": 64},
    {"block_keys": 64, "attention_stages": 3},
    {"combined_rows": 4},
    {"warps": 4},
)


class Case:
    """An action expert of full size with what it reads, and a way to run it in given tiles."""

    def __init__(self, batch: int, device: torch.device) -> None:
        full = Pi05Config.pi05_base()
        config = dataclasses.replace(  # vision and prefix are not run
            full,
            vision=dataclasses.replace(full.vision, layers=1),
            prefix=dataclasses.replace(full.prefix, vocab=1024, width=256, mlp=256),
        )
        model = random_model(config, device, "openpi")
        capacity, head_dim = POSITIONS + config.horizon, config.prefix.head_dim
        shape = (2, config.prefix.layers, batch, capacity, head_dim)
        self.noise = torch.randn(batch, config.horizon, config.action_dim, device=device)
        guidance = [torch.zeros(size, device=device) for size in (self.noise.shape, self.noise.shape[:2], (batch,))]
        lengths = torch.full((batch,), POSITIONS, dtype=torch.int32, device=device)
        inputs = DenoiseInputs(self.noise.clone(), lengths, *guidance)
        table = rotary(torch.arange(capacity, device=device)[None], head_dim, torch.float32)
        rope = table.cos[0, 0].contiguous(), table.sin[0, 0].contiguous()
        weights, schedule = pack(model).expert, make_schedule(model, 10, "lerobot")
        self.flow = Flow(inputs, *torch.randn(shape, device=device).to(torch.bfloat16), weights, schedule, rope)
        denoise_plain(self.flow)
        self.expected = inputs.x_t.clone()

    def shipped(self) -> Tiling:
        rows = self.noise.shape[0] * self.noise.shape[1]
        return Tiling.of(rows, torch.bfloat16, self.flow.weights.out.shape[1], self.noise.device)

    def time(self, tiling: Tiling, repeats: int) -> tuple[float, float, float]:
        """Median and largest milliseconds, and the relative difference from the plain twin."""
        buffers = DenoiseBuffers.allocate(self.flow.weights, self.flow.keys, self.noise.shape[1], tiling)

        def run() -> None:
            x_t.copy_(self.noise)
            denoise_triton(self.flow, buffers)

        x_t = self.flow.inputs.x_t
        run()
        torch.cuda.synchronize()
        difference = torch.linalg.vector_norm(x_t - self.expected) / torch.linalg.vector_norm(self.expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        times = times[3:]
        return statistics.median(times), max(times), float(difference)


def changes(text: str) -> dict[str, int]:
    """ "stages=4,inner=128" -> {"stages": 4, "inner": 128}. For argparse."""
    result = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in Tiling.__dataclass_fields__ or not value.isdecimal():
            raise argparse.ArgumentTypeError(f"expected sizes of a Tiling, such as stages=4, got {part!r}")
        result[name] = int(value)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1, help="requests (default: 1)")
    parser.add_argument("--try", dest="tries", type=changes, action="append", metavar="SIZE=N,...", help="repeatable")
    parser.add_argument("--repeats", type=int, default=20, help="timed flows a line (default: 20)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    case = Case(arguments.batch, torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, batch {arguments.batch}")
    base = None
    for change in ({}, *(arguments.tries or NEIGHBOURS)):
        label = ",".join(f"{name}={value}" for name, value in change.items()) or "shipped"
        try:
            median, largest, difference = case.time(dataclasses.replace(case.shipped(), **change), arguments.repeats)
        except Exception as error:  # tiles that do not fit are a finding as well
            print(f"{label:32} {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        base = base or median
        print(
            f"{label:32} {median:8.3f} ms (largest {largest:.3f})  x {median / base:.3f}  difference {difference:.1e}"
        )


if __name__ == "__main__":
    main()
