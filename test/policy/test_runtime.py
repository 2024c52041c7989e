"""How a policy is run: compile modes, float8, the model sizes of each path, and what is warmed up."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pi05_ros import Observation, Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.checkpoint.making import PRESETS
from pi05_ros.engine import EngineRequest
from pi05_ros.errors import InferenceError, ObservationError, Pi05Error
from pi05_ros.model import Pi05Config

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("runtime") / "tiny")


def load(folder: Path, **options: Any) -> Policy:
    return Policy.from_checkpoint(folder, **{"device": "cpu", "precision": "float32", **options})


@pytest.fixture
def policy(folder: Path) -> Iterator[Policy]:
    with load(folder) as policy:
        yield policy


def observation(shape: tuple[int, int] = (48, 64), tokens: int = 20) -> Observation:
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for name in CAMERAS}
    return Observation(images, np.zeros(14), tokens=rng.integers(0, 1000, tokens))


# ---- compile modes and precisions ----


def test_graphs_on_a_cpu_are_the_same_path_uncaptured_which_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pi05_ros"), load(folder) as policy, load(folder, compile_mode="eager") as eager:
        for _ in range(2):
            chunk = policy.infer(observation(), seed=1)
        assert policy.metadata["runtime"]["compile_mode"] == "eager"
        assert np.array_equal(chunk.actions, eager.infer(observation(), seed=1).actions)
    assert sum("needs a CUDA device" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("precision", ["float32", "openpi", "bfloat16"])
def test_the_fast_path_is_as_exact_as_its_precision(folder: Path, precision: str) -> None:
    with (
        load(folder, compile_mode="plain") as reference,
        load(folder, precision=precision, compile_mode="plain") as plain,
        load(folder, precision=precision) as fast,
    ):
        expected, *others = (one.infer(observation(), seed=1).model_actions for one in (reference, plain, fast))
    plain_error, fast_error = (np.linalg.norm(other - expected) / np.linalg.norm(expected) for other in others)
    assert fast_error < max(1.5 * plain_error, 5e-6)


def no_weights(*_: Any) -> None:
    raise AssertionError("weights were read")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "precision: fp8 needs a GPU of compute capability 8.9 or more, and the device is the CPU"),
        (
            {"device": "cuda"},
            "precision: fp8 needs a GPU of compute capability 8.9 or more, and the device is A100 of compute "
            "capability 8.0; openpi runs on any.",
        ),
        ({"device": "cuda", "compile_mode": "plain"}, "precision: fp8 needs compile_mode graphs or eager, got plain"),
    ],
)
def test_float8_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], message: str
) -> None:
    monkeypatch.setattr("pi05_ros.policy.policy.load_model", no_weights)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(Pi05Error) as caught:
        load(folder, precision="fp8", **options)
    assert str(caught.value).startswith(message)


def test_float8_is_openpi_with_other_products(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where the kernels' twins compute what a GPU would."""
    monkeypatch.setattr("pi05_ros.policy.loading.has_fp8", lambda device: True)
    with load(folder, precision="fp8") as policy, load(folder, precision="openpi") as openpi:
        chunk, expected = (one.infer(observation(), seed=1).model_actions for one in (policy, openpi))
        runtime = json.loads(json.dumps(policy.metadata["runtime"]))
        assert policy.engine.path.model.prefix.embed_tokens.weight.dtype == torch.bfloat16
    error = np.linalg.norm(chunk - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.2
    assert (runtime["precision"], runtime["materialize_dtype"]) == ("fp8", "bf16")
    assert runtime["float8"] == ["prefix.mlp"]


def test_metadata_says_how_it_runs(folder: Path) -> None:
    with load(folder, compile_mode="plain", prefix_cache=3, max_batch=2) as policy:
        assert policy.metadata["runtime"] == {
            "device": "cpu",
            "precision": "float32",
            "materialize_dtype": "fp32",
            "float8": [],
            "compile_mode": "plain",
            "cuda_graph": {"enabled": False},
            "prefix_cache": 3,
            "max_batch": 2,
        }


@pytest.mark.parametrize(
    "options", [{"prefix_cache": -1}, {"max_batch": 0}, {"batch_delay_ms": -1.0}, {"compile_mode": "fast"}]
)
def test_wrong_options_are_found_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("pi05_ros.policy.policy.load_model", no_weights)
    with pytest.raises(Pi05Error, match=f"{next(iter(options))}: expected"):
        load(folder, **options)


def test_a_size_that_only_the_plain_path_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Pi05Config.tiny()
    other = replace(tiny, expert=replace(tiny.expert, mlp=96))
    monkeypatch.setitem(PRESETS, "tiny", lambda: other)
    folder = make_checkpoint("tiny", tmp_path / "odd")
    with pytest.raises(Pi05Error, match=r'expert\.mlp: .* got 96\. compile_mode="plain" runs without kernels\.'):
        load(folder)
    with load(folder, compile_mode="plain") as policy:
        assert policy.infer(observation(), seed=1).actions.shape == (50, 14)


# ---- warming up ----


def seen(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> list[EngineRequest]:
    """Requests that the engine's path runs from now on; batches of one."""
    requests: list[EngineRequest] = []
    run = policy.engine.path.run

    def record(batch: Any) -> Any:
        assert len(batch) == 1
        requests.extend(batch)
        return run(batch)

    monkeypatch.setattr(policy.engine.path, "run", record)
    return requests


def test_every_bucket_is_warmed_up_once(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = seen(policy, monkeypatch)
    assert policy.warm_up() > 0
    assert policy.checkpoint.prompt_length == 200
    assert [len(request.tokens) for request in requests] == [200, 192, 160, 128, 96, 64, 32]
    for request in requests:
        assert [(image.shape, image.dtype) for image in request.images] == [((480, 640, 3), np.uint8)] * 3
        assert request.num_steps == policy.checkpoint.num_steps
        assert request.graphs is None
    stats = policy.engine.stats()
    assert (stats["batches"], stats["cache"]["entries"], stats["cache"]["misses"]) == ({1: 7}, 0, 0)


def test_what_was_warmed_up_is_what_an_observation_needs(policy: Policy) -> None:
    """An ordinary request afterwards makes no program: none is compiled or captured."""
    policy.warm_up(dict.fromkeys(CAMERAS, (48, 64)), [20])
    programs = dict(policy.engine.path._programs)
    assert len(programs) == 1
    policy.infer(observation((48, 64), tokens=32))
    assert policy.engine.path._programs == programs
    policy.infer(observation((48, 65), tokens=32))
    assert len(policy.engine.path._programs) == 2


def test_batches_of_clients_are_warmed_up_where_there_will_be_some(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    run = policy.engine.path.run

    def record(requests: Any) -> Any:
        batches.append((len(requests), len(requests[0].tokens)))
        return run(requests)

    monkeypatch.setattr(policy.engine.path, "run", record)
    policy.warm_up(dict.fromkeys(CAMERAS, (48, 64)), [20, 60], batches=range(1, 5))
    sizes = [(size, tokens) for size in (4, 3, 2, 1) for tokens in (64, 32)]  # as padded
    assert batches == sizes, "the robot's own, which run alone, come last"


def test_warming_up_what_is_asked(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = seen(policy, monkeypatch)
    policy.warm_up({"cam_right_wrist": (24, 33), "cam_high": (10, 20)}, [1, 150, 200, 31, 140], num_steps=3)
    assert [len(request.tokens) for request in requests] == [200, 160, 32], "the longest of each bucket"
    assert {tuple(image.shape for image in request.images) for request in requests} == {((10, 20, 3), (24, 33, 3))}
    assert {request.num_steps for request in requests} == {3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_shapes": {"cam_hihg": (4, 4)}}, r"images\.cam_hihg: unknown camera"),
        ({"image_shapes": {}}, "images: at least one of"),
        (
            {"image_shapes": {"cam_high": (4, 4, 3)}},
            r"image_shapes\.cam_high: expected height and width, got \(4, 4, 3",
        ),
        ({"image_shapes": {"cam_high": 480}}, r"image_shapes\.cam_high: expected height and width, got 480"),
        ({"image_shapes": {"cam_high": (480, 0)}}, r"image_shapes\.cam_high: expected an integer from 1 to .*, got 0"),
        ({"prompt_lengths": [20, 201]}, "prompt_lengths: expected an integer from 1 to 200, got 201"),
        ({"prompt_lengths": [20], "batches": [1, 5]}, "batches: expected an integer from 1 to 4, got 5"),
        ({"prompt_lengths": [20], "num_steps": 0}, "num_steps: expected an integer from 1"),
    ],
)
def test_warming_up_what_cannot_come(policy: Policy, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        policy.warm_up(**options)
    assert policy.engine.stats()["requests"] == 0


def test_others_go_before_a_warm_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, max_batch=1) as policy:
        requests = seen(policy, monkeypatch)
        busy = policy.submit(observation(), num_steps=200)
        warming = threading.Thread(target=policy.warm_up, kwargs={"prompt_lengths": [60]})
        warming.start()
        while policy.engine.stats()["requests"] < 2:
            threading.Event().wait(0.001)
        late = policy.submit(observation(tokens=30))
        warming.join(60)
        assert busy.done()
        assert late.done()
        assert [len(request.tokens) for request in requests] == [20, 30, 64]


def test_progress_tells_and_may_end_it(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    run = policy.engine.path.run

    def wait_and_run(batch: Any) -> Any:
        entered.set()
        assert leave.wait(30)
        return run(batch)

    monkeypatch.setattr(policy.engine.path, "run", wait_and_run)
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        raise Pi05Error("enough")

    with pytest.raises(Pi05Error, match="enough"):
        policy.warm_up(prompt_lengths=[20, 60], progress=progress)
    assert told == [(0, 2)]
    leave.set()
    assert policy.infer(observation(), seed=1).actions.shape == (50, 14)
    assert policy.engine.stats()["answered"] <= 2, "the second was never asked for"


def test_progress_comes_to_its_end(policy: Policy) -> None:
    told: list[tuple[int, int]] = []
    policy.warm_up(prompt_lengths=[20, 60], progress=lambda done, total: told.append((done, total)))
    assert sorted(set(told)) == [(0, 2), (1, 2), (2, 2)]
    assert told == sorted(told)


def test_damaged_weights_show_when_it_is_warmed_up(policy: Policy) -> None:
    policy.engine.path.model.action_out_proj.bias[3] = float("nan")
    with pytest.raises(InferenceError, match="non-finite actions"):
        policy.warm_up(prompt_lengths=[20])


def test_only_a_gpu_compiles(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not policy.compiles
    monkeypatch.setattr(policy.engine, "device", torch.device("cuda"))
    assert policy.compiles
