"""The golden data of test/golden: numbers that LeRobot and openpi gave for small random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"

VELOCITY_LIMIT = 2e-6
ACTIONS_LIMIT = 2e-6  # times the largest expected value
PREFIX_LIMIT = 4e-6  # times the largest expected value, at least 1
ROBOT_LIMIT = 5e-6  # times the largest expected value


def cases(file: str) -> list[dict[str, Any]]:
    """The cases that a JSON file of the golden data lists."""
    found: list[dict[str, Any]] = json.loads((GOLDEN / file).read_text())["cases"]
    return found


def names(file: str) -> list[str]:
    return [case["name"] for case in cases(file)]


def case(file: str, name: str) -> dict[str, Any]:
    return next(one for one in cases(file) if one["name"] == name)


def close(actual: Any, expected: Any, limit: float) -> bool:
    """Largest difference within ``limit`` times the largest expected value."""
    difference = float(abs(actual - expected).max())
    scale = float(abs(expected).max())
    return difference <= limit * scale
