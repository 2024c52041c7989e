"""make_checkpoint: write a random-weight Pi0.5 checkpoint, complete with tokenizer and norm stats."""

from __future__ import annotations

import argparse

from pi05_ros.errors import CheckpointError
from pi05_ros.tools.command_line import progress_bar, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="make_checkpoint", description=__doc__)
    parser.add_argument(
        "--preset", choices=("tiny", "pi05_base"), default="tiny", help="size; pi05_base is 14.5 GB in float32"
    )
    parser.add_argument("--layout", choices=("lerobot", "openpi"), default="lerobot", help="whose files and names")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write (made if it is not there)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same weights (default: 0)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the file (default: float32 for lerobot, bfloat16 for openpi)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite a checkpoint that is there already")
    run(parser, _make)


def _make(arguments: argparse.Namespace) -> None:
    from pi05_ros.checkpoint import make_checkpoint

    if not arguments.output:
        raise CheckpointError("--output: expected a folder, got an empty name.")
    with progress_bar("writing weights", "GB", 1e9) as progress:
        folder = make_checkpoint(
            arguments.preset,
            arguments.output,
            arguments.layout,
            arguments.seed,
            arguments.dtype,
            overwrite=arguments.force,
            progress=progress,
        )
    what = f"{arguments.preset}, {arguments.layout} layout, seed {arguments.seed}"
    print(f"{folder}: random weights ({what}); not for a robot.")


if __name__ == "__main__":
    main()
