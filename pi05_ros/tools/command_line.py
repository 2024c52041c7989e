"""What all command-line tools share: one line for a user's error, a progress bar on a terminal."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pi05_ros.errors import Pi05Error


def run(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], None]) -> None:
    """Parse, set up logging, run. A user's error is one line and exit code 1; --debug shows where it came from."""
    parser.add_argument("--debug", action="store_true", help="show debug logs, and the traceback of an error")
    arguments = parser.parse_args()
    level = logging.DEBUG if arguments.debug else logging.INFO
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        command(arguments)
    except (Pi05Error, OSError) as error:
        if arguments.debug:
            raise
        sys.exit(f"{parser.prog}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def progress_bar(what: str, unit: str, scale: float = 1.0) -> Iterator[Callable[[int, int], None]]:
    """A function to call with done and total; draws one line on stderr if that is a terminal."""
    shown = sys.stderr.isatty()

    def draw(done: int, total: int) -> None:
        if shown:
            filled = int(30 * done / max(total, 1))
            bar = "#" * filled + "." * (30 - filled)
            print(
                f"\r{what} [{bar}] {done / scale:.2f}/{total / scale:.2f} {unit}", end="", file=sys.stderr, flush=True
            )

    yield draw
    if shown:
        print(file=sys.stderr)
