"""What most tests of the server need; a file that needs another policy has its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pi05_ros.policy import Policy
from server.serving import load, serving


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    with load() as policy:
        yield policy


@pytest.fixture(scope="module")
def url(policy: Policy) -> Iterator[str]:
    """Of a server of that policy."""
    with serving(policy) as sidecar:
        yield sidecar.url
