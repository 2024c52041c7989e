"""The ``ros2 launch`` verb, for the wheels environment, where no package brings it (ros2launch has no wheel).

setup.sh puts this file beside the other ros2cli plugins. On an installed ROS 2 the real verb is used instead; this
one understands the same command lines: a launch file, or a package and the name of one of its launch files, then
``name:=value`` arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import launch
from ament_index_python.packages import PackageNotFoundError, get_package_share_directory
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import AnyLaunchDescriptionSource
from launch.utilities import normalize_to_list_of_substitutions
from ros2cli.command import CommandExtension


class LaunchCommand(CommandExtension):
    """Run a launch file."""

    def add_arguments(self, parser: argparse.ArgumentParser, cli_name: str, *, argv: Any = None) -> None:
        parser.add_argument(
            "-n",
            "--noninteractive",
            action="store_true",
            default=not sys.stdin.isatty(),
            help="launch has no terminal, so it passes Ctrl-C on to its processes itself",
        )
        parser.add_argument("-d", "--debug", action="store_true", help="show launch's debug messages")
        parser.add_argument("-s", "--show-args", action="store_true", help="list the launch file's arguments and exit")
        parser.add_argument("package_or_file", help="name of a package, or path of a launch file")
        parser.add_argument(
            "rest",
            nargs=argparse.REMAINDER,
            metavar="[launch_file] [name:=value ...]",
            help="launch file of the package (where a package was named), then its arguments",
        )

    def main(self, *, parser: argparse.ArgumentParser, args: argparse.Namespace) -> int | str:
        rest = list(args.rest)
        # A verb's options may also stand at the end: `ros2 launch pi05_ros policy.launch.py -s`.
        show = args.show_args | _take(rest, {"-s", "--show-args"})
        debug = args.debug | _take(rest, {"-d", "--debug"})
        noninteractive = args.noninteractive | _take(rest, {"-n", "--noninteractive"})
        try:
            path = _launch_file(args.package_or_file, rest)
            arguments = _parse_arguments(rest)
        except ValueError as error:
            return str(error)
        service = launch.LaunchService(argv=rest, noninteractive=noninteractive, debug=debug)
        source = AnyLaunchDescriptionSource(str(path))
        if show:
            return _show_arguments(source.get_launch_description(service.context))
        service.include_launch_description(
            launch.LaunchDescription([IncludeLaunchDescription(source, launch_arguments=arguments)])
        )
        return int(service.run())  # forwards SIGINT and SIGTERM to its processes, and waits for them


def _take(arguments: list[str], flags: set[str]) -> bool:
    """Remove those flags from the list; True if one was there."""
    kept = [argument for argument in arguments if argument not in flags]
    found = len(kept) < len(arguments)
    arguments[:] = kept
    return found


def _launch_file(package_or_file: str, rest: list[str]) -> Path:
    """The launch file that is meant; takes its name off ``rest`` where a package was named."""
    if Path(package_or_file).is_file():
        return Path(package_or_file)
    if not rest or ":=" in rest[0]:
        raise ValueError(f"{package_or_file!r} is not a file, and no launch file of a package of that name was given")
    name = rest.pop(0)
    try:
        share = Path(get_package_share_directory(package_or_file))
    except (PackageNotFoundError, ValueError) as error:
        raise ValueError(f"Package {package_or_file!r} not found") from error
    found = sorted(path for path in share.rglob(name) if path.is_file())
    if len(found) != 1:
        there = ", ".join(sorted(path.name for path in share.rglob("*launch*.py")))
        raise ValueError(f"{len(found)} files named {name!r} in {share}; launch files there: {there or 'none'}")
    return found[0]


def _parse_arguments(arguments: Iterable[str]) -> list[tuple[str, str]]:
    """``name:=value`` strings as pairs, the last of a name winning, as in ros2launch."""
    pairs = {}
    for argument in arguments:
        name, separator, value = argument.partition(":=")
        if not separator or not name:
            raise ValueError(f"malformed launch argument {argument!r}, expected format '<name>:=<value>'")
        pairs[name] = value
    return list(pairs.items())


def _show_arguments(description: launch.LaunchDescription) -> int:
    lines = ["Arguments (pass arguments as '<name>:=<value>'):"]
    for argument in description.get_launch_arguments():
        lines += ["", f"    '{argument.name}':", f"        {argument.description}"]
        if argument.default_value is not None:
            parts = normalize_to_list_of_substitutions(argument.default_value)
            lines.append(f"        (default: {' + '.join(part.describe() for part in parts)})")
    sys.stdout.write("\n".join(lines if len(lines) > 1 else [*lines, "", "  No arguments."]) + "\n")
    return 0
