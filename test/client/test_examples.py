"""The examples run as they stand, against a real server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from server.serving import load, serving

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TOKEN = "open sesame"
NUMBER = r"-?\d+\.\d+"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with load() as policy, serving(policy, token=TOKEN) as sidecar:
        yield sidecar.url


def run(*command: str | Path, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PI05_ROS_TOKEN": token}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def output(*command: str | Path) -> str:
    result = run(*command)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_curl(url: str) -> None:
    metadata, reply = output(EXAMPLES / "curl.sh", url).splitlines()
    assert '"object":"action.metadata"' in metadata
    assert re.search(rf'"actions":\[\[{NUMBER},', reply)
    refused = run(EXAMPLES / "curl.sh", url, token="wrong")
    assert refused.returncode != 0
    assert "A token is needed" in refused.stdout


def test_python(url: str) -> None:
    text = output(sys.executable, EXAMPLES / "python_client.py", url)
    assert "actions: (50, 14) float32" in text
    assert re.search(rf"left_waist +{NUMBER}\n", text)
    assert "a state that is too short: state: expected 14 numbers" in text


def test_openpi(url: str) -> None:
    address = urlsplit(url)
    text = output(sys.executable, EXAMPLES / "openpi_policy.py", str(address.hostname), str(address.port))
    assert text.startswith("model: tiny\n")
    assert text.count("step ") == 12


@pytest.mark.skipif(shutil.which("node") is None, reason="JavaScript needs Node, which is not on the PATH")
def test_javascript(url: str) -> None:
    text = output("node", EXAMPLES / "javascript_client.mjs", url)
    assert "actions: 50 x 14" in text
    assert "a state that is too short: 400 state: state: expected 14 numbers" in text


def test_the_table_names_them_all() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"examples/([\w.]+)`", text))
    assert named == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".py", ".mjs")}
