"""The load generator: real processes in short form, and that it sees what must not happen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pi05_ros.client import ServerRefusal, Timeout

ROOT = Path(__file__).parents[2]
CHUNKS = np.random.default_rng(0).standard_normal((3, 5, 2)).astype(np.float32)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, ROOT / "benchmarks/serve_load.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import load_clients

    return load_clients


@pytest.fixture
def serve_load(clients: ModuleType) -> ModuleType:
    import serve_load

    return serve_load


def test_a_short_run_finds_nothing_wrong(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    result = run("--requests", "3", "--clients", "9", "--seconds", "2", "--json", found)
    assert result.returncode == 0, result.stderr
    assert "as published and not measured here" in result.stdout
    content = json.loads(found.read_text())
    assert [len(row["ms"]) for row in content["overhead"]] == [3, 3, 3, 3]
    accounts = content["crowd"]["accounts"]
    assert sorted({account["protocol"] for account in accounts}) == ["http", "openpi", "realtime"]
    assert len(accounts) == 9
    assert all(account["ms"] for account in accounts)
    assert len(content["crowd"]["memory"]) == 3


def test_a_server_that_is_not_there_is_one_line() -> None:
    result = run("--url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert result.stderr.startswith("serve_load.py: http://127.0.0.1:9 cannot be reached")


def test_why_a_server_did_not_come_up_is_said(tmp_path: Path) -> None:
    result = run("--checkpoint", tmp_path / "nothing")
    assert result.returncode == 1
    assert "The server's last words:" in result.stderr
    assert str(tmp_path / "nothing") in result.stderr


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (lambda: CHUNKS[1] * 1.001, {"crossed": 0, "lost": 0, "errors": 0}),  # as a batch's rounding has it
        (lambda: CHUNKS[2], {"crossed": 1, "lost": 0, "errors": 0}),
        (lambda: (CHUNKS[1] + CHUNKS[2]) / 2, {"crossed": 1, "lost": 0, "errors": 0}),
        (lambda: CHUNKS[1] * np.float32(np.nan), {"crossed": 1, "lost": 0, "errors": 0}),
        (lambda: raised(ServerRefusal(503, "busy", "", "busy")), {"crossed": 0, "lost": 0, "errors": 1}),
        (lambda: raised(Timeout("late")), {"crossed": 0, "lost": 1, "errors": 1}),
        (lambda: raised(KeyError("actions")), {"crossed": 0, "lost": 1, "errors": 1}),
    ],
)
def test_a_reply_is_held_against_its_own(clients: ModuleType, answer: Callable[[], Any], seen: dict[str, int]) -> None:
    account, asked = clients.Account("http"), []

    def call(_: dict[str, Any]) -> tuple[np.ndarray, float]:
        asked.append(1)
        time.sleep(0.05)  # so that the time is over after this one
        return answer(), 1.0

    clients.ask_until(time.monotonic() + 0.02, call, {}, CHUNKS, 1, account)
    crowd = clients.Crowd(1.0, [account], [])
    assert len(asked) == 1
    assert {name: crowd.total(name) for name in seen} == seen


def raised(error: Exception) -> Any:
    raise error


def test_what_went_wrong_is_an_error(clients: ModuleType, serve_load: ModuleType) -> None:
    def crowd(**changes: Any) -> Any:
        accounts = [
            clients.Account("http", ms=[10.0]),
            clients.Account(**{"protocol": "http", "ms": [15.0], **changes}),
        ]
        return clients.Crowd(1.0, accounts, [100.0, 110.0, 112.0])

    def missed(found: Any) -> list[str]:
        checks = serve_load.kept_apart(found) + serve_load.fair_and_flat(found)
        return [check.text for check in checks if not check.met]

    assert missed(crowd()) == []
    assert missed(crowd(crossed=1)) == ["2 client(s): expected 0 crossed, got 1"]
    assert missed(crowd(lost=1, errors=["late"])) == [
        "2 client(s): expected 0 errors, got 1",
        "2 client(s): expected 0 lost, got 1",
    ]
    assert missed(crowd(ms=[30.0])) == ["slowest client's mean: expected 2 times the fastest's, got 3.00"]
    assert "2 client(s): expected answers for each, 1 had none" in missed(crowd(ms=[]))
    grown = clients.Crowd(1.0, crowd().accounts, [100.0, 110.0, 130.0])
    assert missed(grown) == ["memory: expected 1.05 times that after a quarter of the time, got 1.182"]
