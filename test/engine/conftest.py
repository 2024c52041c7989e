"""An engine whose thread is held, for tests of its queue.

Imports of the package wait until a test runs: Triton is imported with it, and ``kernels/conftest.py`` says how.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine.held_path import HeldPath
    from pi05_ros.engine import Engine


@pytest.fixture
def path() -> HeldPath:
    from engine.held_path import HeldPath

    return HeldPath()


@pytest.fixture
def engine(path: HeldPath) -> Iterator[Engine]:
    """An engine with room for four, and a request on its thread."""
    from engine.held_path import PATIENCE, running

    engine = running(path, max_batch=4, max_queue=4)
    yield engine
    path.let_go()
    assert engine.close(PATIENCE)
