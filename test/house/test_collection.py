"""Every test file is run: one that skips itself while it is imported, or is named otherwise, is noticed by nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_file_gives_tests():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(TESTS)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, timeout=120)
    collected = {line.partition("::")[0] for line in result.stdout.splitlines() if "::" in line}
    files = {str(path.relative_to(TESTS.parent)) for path in TESTS.rglob("test_*.py")}
    assert files - collected == set(), result.stdout[-2000:]
