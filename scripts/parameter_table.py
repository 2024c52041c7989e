"""The table of policy_node's parameters in the documentation, from their declarations.

Usage: python scripts/parameter_table.py          print it
       python scripts/parameter_table.py --write  put it into docs/reference/ros-interface.md
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from pi05_ros.ros.declarations import PARAMETERS, Spec

PAGE = Path(__file__).parents[1] / "docs/reference/ros-interface.md"
HEAD = ["| name | default | may be | |", "|---|---|---|---|"]
PLACE = re.compile(rf"(?<=^{re.escape(HEAD[0])}$\n)(^\|.*$\n)+", re.MULTILINE)
"""The rows below the table's head in the page."""


def row(spec: Spec) -> str:
    description = spec.description.replace("|", r"\|").replace("<", r"\<")
    running = " May be changed while the node runs." if spec.running else ""
    return f"| `{spec.name}` | {json.dumps(spec.default)} | {spec.legal} | {description}{running} |"


def table() -> str:
    """Markdown, one line a parameter."""
    return "\n".join([*HEAD, *map(row, PARAMETERS)]) + "\n"


def in_page(text: str) -> str:
    """The page with the table of today. Raises ValueError: it has no place for it."""
    rows = "".join(table().splitlines(keepends=True)[1:])
    replaced, count = PLACE.subn(lambda _: rows, text)
    if count != 1:
        raise ValueError(f"{PAGE.name}: expected one table with the head {HEAD[0]!r}, got {count}.")
    return replaced


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(in_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        sys.stdout.write(table())


if __name__ == "__main__":
    main()
