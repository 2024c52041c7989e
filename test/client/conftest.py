"""A real server with a small policy, in this process, for the tests of the client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pi05_ros import Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.sidecar import ServerSettings, Sidecar


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("client") / "tiny")


@pytest.fixture(scope="package")
def policy(checkpoint: Path) -> Iterator[Policy]:
    with Policy.from_checkpoint(checkpoint, device="cpu", precision="float32", robot="aloha_sim") as policy:
        yield policy


@pytest.fixture(scope="package")
def host(policy: Policy) -> PolicyHost:
    host = PolicyHost()
    host.serve(policy)
    return host


@pytest.fixture(scope="package")
def server(host: PolicyHost) -> Iterator[Sidecar]:
    sidecar = Sidecar(host, ServerSettings(port=0))
    sidecar.start()
    yield sidecar
    sidecar.close()
