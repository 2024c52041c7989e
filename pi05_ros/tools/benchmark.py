"""Times inference on this machine, and holds it against what the hardware could do.

The engine is timed from uint8 images and token ids on the host to actions on the host, in the ways it can run (plain:
the readable reference; eager: the engine's kernels; graphs: the same, captured), in several precisions and for several
kinds of request. Beside the times stands how far the actions are from a float32 reference. Without --checkpoint the
weights are random, made on the device; nothing is written to disk.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pi05_ros.errors import Pi05Error
from pi05_ros.tools.command_line import run

PRECISIONS = ("openpi", "bfloat16", "float32", "fp8")
PATHS = ("plain", "eager", "graphs")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="weights to use (default: random ones)")
    source.add_argument(
        "--preset",
        choices=("tiny", "pi05_base"),
        help="size of random weights (default: pi05_base on a GPU, tiny on a CPU)",
    )
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:<index> or cpu (default: auto)")
    parser.add_argument(
        "--precision",
        type=_some_of(PRECISIONS),
        metavar="P,...",
        help=f"some of {','.join(PRECISIONS)} (default: openpi,bfloat16, and fp8 where the device has it)",
    )
    parser.add_argument(
        "--path",
        type=_some_of(PATHS),
        metavar="P,...",
        help="some of plain,eager,graphs (default: all; on a CPU, which has no graphs, plain,eager)",
    )
    parser.add_argument(
        "--repeats",
        type=_whole(1, 1_000_000),
        metavar="N",
        help="timed requests (or batches) a row (default: 50 on a GPU, else 5); a tenth, 3 at least, on the plain path",
    )
    parser.add_argument(
        "--num-steps", type=_whole(1, 1000), default=10, metavar="N", help="denoise steps (default: 10)"
    )
    parser.add_argument("--quick", action="store_true", help="three rows for each path and a fifth of the repeats")
    parser.add_argument(
        "--no-error",
        action="store_true",
        help="without the table of action errors, which needs a float32 copy of the weights (13.4 GB for pi05_base)",
    )
    parser.add_argument("--seed", type=_whole(0, 2**31), default=0, help="of random weights and inputs (default: 0)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to a JSON file")
    run(parser, _benchmark)


def _some_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated lists; what it gives is in the order of ``known``."""

    def parse(text: str) -> tuple[str, ...]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {name!r}")
        return tuple(name for name in known if name in names)

    return parse


def _whole(low: int, high: int) -> Callable[[str], int]:
    """A parser of whole numbers from low to high."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return parse


def _check_writable(file: Path) -> None:
    """Raises Pi05Error before minutes are spent on what cannot be written."""
    if not file.parent.is_dir():
        raise Pi05Error(f"--json: {file.parent} is not a folder.")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise Pi05Error(f"--json: {file} cannot be written.")


def _benchmark(arguments: argparse.Namespace) -> None:
    from pi05_ros.engine.roofline import has_fp8
    from pi05_ros.policy.loading import resolve_device
    from pi05_ros.tools.benchmark_rows import Weights
    from pi05_ros.tools.benchmark_run import Run

    device = resolve_device(arguments.device)
    on_gpu = device.type == "cuda"
    precisions = arguments.precision or ("openpi", "bfloat16", *(("fp8",) if has_fp8(device) else ()))
    if "fp8" in precisions and not has_fp8(device):
        raise Pi05Error(f"--precision: fp8 needs a GPU of compute capability 8.9 or more; {device} is none.")
    if arguments.json is not None:
        _check_writable(arguments.json.absolute())
    if "graphs" in (arguments.path or ()) and not on_gpu:
        raise Pi05Error(f"--path: graphs needs a CUDA device, and {device} is none.")
    preset = arguments.preset or ("pi05_base" if on_gpu else "tiny")
    repeats = arguments.repeats or (50 if on_gpu else 5)
    report = Run(
        weights=Weights.of(arguments.checkpoint, preset, arguments.seed),
        device=device,
        precisions=precisions,
        paths=arguments.path or (PATHS if on_gpu else ("plain", "eager")),
        quick=arguments.quick,
        repeats=max(1, repeats // 5) if arguments.quick else repeats,
        num_steps=arguments.num_steps,
        seed=arguments.seed,
        with_error=not arguments.no_error,
    ).report()
    print(report.text(arguments.markdown), end="", flush=True)  # whatever becomes of the file, this has been measured
    if arguments.json is not None:
        arguments.json.write_text(report.json(), encoding="utf-8")
    if report.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
