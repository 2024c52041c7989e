"""The benchmark measures what it says it measures, and one thing that fails does not take the rest with it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pi05_ros.checkpoint import make_checkpoint, random_model
from pi05_ros.engine import Engine, PlainPath
from pi05_ros.engine.roofline import Ceilings, Workload, floors
from pi05_ros.errors import InferenceError
from pi05_ros.model import Pi05Config
from pi05_ros.tools import benchmark_run
from pi05_ros.tools.benchmark_rows import BASE, FULL, Case, Requests, Weights, measure, probe, submit_together
from pi05_ros.tools.benchmark_run import Run

CPU = torch.device("cpu")
TINY = Pi05Config.tiny()
CEILINGS = Ceilings({"bfloat16": 1e12, "float32": 1e12}, bandwidth=1e10)


def engine(max_batch: int = 8) -> Engine:
    path = PlainPath(random_model(TINY, CPU, "float32"), resize="lerobot", time_grid="lerobot")
    return Engine(path, max_batch=max_batch, batch_delay=0.0)


def small_run(**changes: object) -> Run:
    settings = {
        "weights": Weights.of(None, "tiny", 0),
        "device": CPU,
        "precisions": ("float32",),
        "paths": ("plain",),
        "quick": True,
        "repeats": 1,
        "num_steps": 1,
        "seed": 0,
        "with_error": True,
    }
    return Run(**{**settings, **changes})  # type: ignore[arg-type]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pi05_ros.tools.benchmark", "--device", "cpu", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_command_line(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    checkpoint = make_checkpoint("tiny", tmp_path / "tiny")
    ended = command("--checkpoint", str(checkpoint), "--quick", "--num-steps", "2", "--json", str(file), "--markdown")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(file.read_text())
    assert {"date", "processor", "versions"} <= set(found["environment"])
    base = next(row for row in found["rows"] if row["name"] == "base" and row["path"] == "plain")
    assert 0 < base["median"] <= base["p95"]
    assert set(base["stages"]) == {"preprocess", "vision", "prefix", "denoise"}
    assert [one["hit_miss"] for one in found["fidelity"]] == [0.0] * len(found["fidelity"])
    assert {one["precision"] for one in found["fidelity"]} == {"openpi", "bfloat16"}
    for line in filter(lambda line: line.startswith("|"), ended.stdout.splitlines()):
        assert line.count("|") in (6, 8, 16)
    assert "openpi plain batch 4: " in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--precision", "openpi,half"],
            2,
            "argument --precision: expected some of openpi,bfloat16,float32,fp8, got 'half'",
        ),
        (["--repeats", "0"], 2, "argument --repeats: expected a whole number from 1 to 1000000, got '0'"),
        (["--precision", "fp8"], 1, "--precision: fp8 needs a GPU of compute capability 8.9 or more; cpu is none."),
        (["--json", "/no/such/file"], 1, "--json: /no/such is not a folder."),
        (["--json", "/tmp"], 1, "--json: /tmp cannot be written."),
        (["--path", "graphs", "--device", "cpu"], 1, "--path: graphs needs a CUDA device, and cpu is none."),
        (["--seed", "-1"], 2, "argument --seed: expected a whole number from 0 to"),
        (["--num-steps", "1001"], 2, "argument --num-steps: expected a whole number from 1 to 1000, got '1001'"),
        (["--checkpoint", "/no/such"], 1, "/no/such"),
    ],
)
def test_errors_of_the_user(arguments: list[str], code: int, message: str) -> None:
    ended = command(*arguments)
    assert ended.returncode == code
    assert message in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_damaged_checkpoint_is_said_once(tmp_path: Path) -> None:
    damaged = make_checkpoint("tiny", tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    ended = command("--checkpoint", str(damaged), "--quick")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("model.safetensors: not readable as safetensors") == 1
    assert "Traceback" not in ended.stderr


def test_every_row_runs_and_is_held_against_its_floor() -> None:
    running = engine()
    requests = Requests(TINY, num_steps=2)
    rows = [measure(running, "float32", case, requests, 1, CEILINGS, warm_up=1) for case in FULL]
    running.close()
    assert [row.case.name for row in rows] == [
        "base", "batch 2", "batch 4", "batch 8", "cache hit", "RTC, identity Jacobian", "1 camera", "2 cameras",
        "prompt 48", "480x640",
    ]  # fmt: skip
    by_name = {row.case.name: row for row in rows}
    expected = floors(TINY, Workload(num_steps=2), "float32", CEILINGS)
    assert by_name["base"].floor == pytest.approx(sum(expected.values()))
    assert by_name["cache hit"].floor == pytest.approx(expected["denoise"])
    assert by_name["batch 4"].per_request == by_name["batch 4"].median / 4


def test_a_batch_is_a_batch() -> None:
    one_by_one, together = engine(max_batch=1), engine()
    requests = Requests(TINY, num_steps=1).batch(Case(batch=3, prompt=4))
    results, _ = submit_together(together, requests)
    assert [result.batch_size for result in results] == [3, 3, 3]
    with pytest.raises(InferenceError, match="did not run as one batch"):
        submit_together(one_by_one, requests)
    for running in (one_by_one, together):
        running.close()


def test_a_hit_that_is_none_is_not_reported_as_one() -> None:
    path = PlainPath(random_model(TINY, CPU, "float32"), resize="lerobot", time_grid="lerobot", prefix_cache=0)
    running = Engine(path)
    requests = Requests(TINY, num_steps=1)
    with pytest.raises(InferenceError, match="expected a cache hit"):
        measure(running, "float32", Case(hit=True), requests, 1, CEILINGS)
    with pytest.raises(InferenceError, match="expected a cache hit"):
        probe(running, [requests.one(BASE)])
    running.close()


def test_requests_are_fresh_and_repeatable() -> None:
    first, second = Requests(TINY, 10, seed=3), Requests(TINY, 10, seed=3)
    one, other = first.one(BASE), first.one(BASE)
    again = second.one(BASE)
    assert not np.array_equal(one.images[0], other.images[0])
    assert all(np.array_equal(a, b) for a, b in zip(one.images, again.images, strict=True))
    assert np.array_equal(one.noise, again.noise)


def test_errors_are_zero_for_the_oracle_itself() -> None:
    (found,) = small_run().report().fidelity
    assert found.error is not None
    assert max(found.error) == 0.0
    assert found.batch_single < 1e-5


def test_precision_costs_something() -> None:
    (found,) = small_run(precisions=("bfloat16",)).report().fidelity
    assert found.error is not None
    assert min(found.error) > 1e-4


def test_one_failure_does_not_take_the_rest_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_at_batch_4(*arguments: object, **others: object) -> object:
        if arguments[2] == Case(batch=4):
            raise RuntimeError("this row is broken")
        return measure(*arguments, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(benchmark_run, "measure", fails_at_batch_4)
    report = small_run().report()
    assert [row.case.name for row in report.rows] == ["base", "cache hit"]
    assert report.failed
    assert report.notes == ["float32 plain batch 4 FAILED: RuntimeError: this row is broken"]
    assert report.notes[0] in report.text(markdown=False)


def test_too_little_memory_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*arguments: object, **others: object) -> object:
        raise torch.cuda.OutOfMemoryError("tried to allocate a lot")

    monkeypatch.setattr(benchmark_run, "measure", too_much)
    monkeypatch.setattr(benchmark_run, "_free_memory", lambda device: 2**20)
    report = small_run().report()
    assert not report.failed
    assert not report.rows
    assert report.notes[0].startswith("No errors against float32: it needs about 2.0 GiB, 0.0 GiB are free.")
    assert report.fidelity[0].error is None


def test_a_path_that_is_not_here_is_said() -> None:
    report = small_run(paths=("plain", "graphs"), with_error=False).report()
    assert {row.path for row in report.rows} == {"plain"}
    assert any(note.startswith("float32 graphs: not here; the engine offers the ") for note in report.notes)


@pytest.mark.skipif(importlib.util.find_spec("lerobot") is not None, reason="LeRobot is here")
def test_the_comparison_says_how_to_install_lerobot() -> None:
    script = Path(__file__).parents[2] / "benchmarks/compare_lerobot.py"
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "LeRobot cannot be imported" in ended.stderr
    assert "pip install 'lerobot[pi]==0.6.1' 'transformers==5.5.4'" in ended.stderr
    assert "Traceback" not in ended.stderr
