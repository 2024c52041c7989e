"""An engine whose thread is held, for tests of its queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.held_path import PATIENCE, HeldPath, running
from pi05_ros.engine import Engine


@pytest.fixture
def path() -> HeldPath:
    return HeldPath()


@pytest.fixture
def engine(path: HeldPath) -> Iterator[Engine]:
    """An engine with room for four, and a request on its thread."""
    engine = running(path, max_batch=4, max_queue=4)
    yield engine
    path.let_go()
    assert engine.close(PATIENCE)
