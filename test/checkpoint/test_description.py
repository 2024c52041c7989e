"""What is read besides weights, and what is refused, by file and field."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import GOLDEN
from safetensors.torch import load_file, save_file

from pi05_ros.checkpoint import make_checkpoint, read_checkpoint, read_norm_stats
from pi05_ros.errors import CheckpointError


@pytest.fixture
def lerobot(tmp_path: Path) -> Path:
    return make_checkpoint("tiny", tmp_path / "lerobot", "lerobot")


@pytest.fixture
def openpi(tmp_path: Path) -> Path:
    return make_checkpoint("tiny", tmp_path / "openpi", "openpi")


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_golden_lerobot_folder() -> None:
    checkpoint = read_checkpoint(GOLDEN / "lerobot_fp32")
    assert checkpoint.layout == "lerobot"
    assert checkpoint.cameras == ("cam_high", "cam_left_wrist", "cam_right_wrist")
    assert (checkpoint.state_dim, checkpoint.action_dim, checkpoint.prompt_length) == (14, 14, 128)
    assert (checkpoint.config.vision.image_size, checkpoint.config.prefix.width) == (56, 72)
    assert checkpoint.normalization == {"state": "QUANTILES", "action": "QUANTILES"}
    assert checkpoint.norm_stats is not None
    stats = load_file(GOLDEN / "lerobot_fp32/policy_preprocessor_step_3_normalizer_processor.safetensors")
    assert np.array_equal(checkpoint.norm_stats.state["q01"], stats["observation.state.q01"].numpy())
    assert checkpoint.norm_stats.state["q01"].dtype == np.float32
    assert checkpoint.tokenizer == GOLDEN / "lerobot_fp32/tokenizer.json"


def test_openpi_folder(openpi: Path) -> None:
    checkpoint = read_checkpoint(openpi)
    assert checkpoint.layout == "openpi"
    assert (checkpoint.cameras, checkpoint.state_dim, checkpoint.action_dim) == ((), None, None)
    assert checkpoint.norm_stats is not None
    assert checkpoint.norm_stats.action["q99"].dtype == np.float64


def test_features_processors_and_unknown_fields(lerobot: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["input_features"] = {
            "observation.images.image": {"type": "VISUAL", "shape": [3, 256, 256]},
            "observation.state": {"type": "STATE", "shape": [8]},
            "observation.images.image2": {"type": "VISUAL", "shape": [3, 256, 256]},
        }
        config |= {"empty_cameras": 1, "chunk_size": 10, "device": "mps", "optimizer_lr": 1, "a_newer_field": {}}
        config["output_features"]["action"]["shape"] = [7]

    edit(lerobot / "config.json", change)

    def processor(data: dict[str, Any]) -> None:
        data["steps"][0]["config"]["rename_map"] = {"observation.images.top": "observation.images.image"}
        data["steps"][2] = {
            "registry_name": "delta_actions_processor",
            "config": {"enabled": True, "exclude_joints": ["Gripper"], "action_names": ["a", "gripper"]},
        }
        data["steps"][3]["config"]["norm_map"] = {"STATE": "MEAN_STD"}

    edit(lerobot / "policy_preprocessor.json", processor)
    checkpoint = read_checkpoint(lerobot)
    assert checkpoint.cameras == ("image", "image2", "empty_camera_0")
    assert (checkpoint.state_dim, checkpoint.action_dim, checkpoint.config.horizon) == (8, 7, 10)
    assert checkpoint.rename_map == {"top": "image"}
    assert checkpoint.relative_actions.enabled
    assert checkpoint.relative_actions.action_names == ("a", "gripper")
    assert checkpoint.normalization == {"state": "MEAN_STD", "action": "QUANTILES"}


def test_state_file_name_comes_from_the_json(lerobot: Path) -> None:
    old = lerobot / "policy_preprocessor_step_3_normalizer_processor.safetensors"
    old.rename(lerobot / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"step_3_normalizer_processor.safetensors: the file does not exist"):
        read_checkpoint(lerobot)
    edit(
        lerobot / "policy_preprocessor.json",
        lambda data: data["steps"][3].update(state_file="elsewhere.safetensors"),
    )
    assert read_checkpoint(lerobot).norm_stats is not None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("type", "pi0", "type: expected 'pi05', got 'pi0'"),
        ("chunk_size", "50", "chunk_size: expected int, got '50'"),
        ("chunk_size", True, "chunk_size: expected int, got True"),
        ("chunk_size", 0, "chunk_size: expected a positive number, got 0"),
        ("paligemma_variant", "gemma_300m", "paligemma_variant: expected 'gemma_2b'"),
        ("image_resolution", [224, 224], r"image_resolution: expected \[56, 56\]"),
        ("input_features", {}, "input_features: expected at least one of type VISUAL"),
        ("pi05_ros_architecture", {"vision": 3}, r"pi05_ros_architecture\.vision: expected an object"),
        ("min_period", 0, "expected 0 < min_period < max_period, got 0"),
        ("pi05_ros_architecture", [1], r"pi05_ros_architecture\.vision: expected an object"),
        ("use_proprioceptive_memory", True, "proprioceptive memory"),
        ("output_features", {"action": {"shape": [0]}}, "output_features.*expected one positive number"),
    ],
)
def test_wrong_fields_are_named(lerobot: Path, field: str, value: object, message: str) -> None:
    edit(lerobot / "config.json", lambda config: config.update({field: value}))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(lerobot)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(("content", "message"), [("{", "not readable as JSON"), ("[]", "expected a JSON object")])
def test_config_that_is_no_json_object(lerobot: Path, content: str, message: str) -> None:
    (lerobot / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(lerobot)
    (lerobot / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: the file does not exist"):
        read_checkpoint(lerobot)
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        read_checkpoint(lerobot / "nowhere")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_statistics_are_refused(lerobot: Path, openpi: Path, value: float) -> None:
    file = lerobot / "policy_preprocessor_step_3_normalizer_processor.safetensors"
    stats = load_file(file)
    stats["observation.state.q99"][5] = value
    save_file(stats, file)
    with pytest.raises(CheckpointError, match=r"observation\.state\.q99: not finite at dimension 5"):
        read_checkpoint(lerobot)

    file = openpi / "assets/trossen/norm_stats.json"
    edit(file, lambda data: data["norm_stats"]["actions"]["q01"].__setitem__(2, value))
    with pytest.raises(CheckpointError, match=r"actions\.q01: not finite at dimension 2"):
        read_checkpoint(openpi)


def test_statistics_of_another_form(lerobot: Path, openpi: Path, tmp_path: Path) -> None:
    file = openpi / "assets/trossen/norm_stats.json"
    edit(file, lambda data: data["norm_stats"]["state"].update(q01=None))
    stats = read_norm_stats(file)
    with pytest.raises(CheckpointError, match="needs q01; the file has mean, std, q99"):
        stats.require("state", "QUANTILES")
    with pytest.raises(CheckpointError, match="mode 'COSINE' is unknown; known: QUANTILES"):
        stats.require("action", "COSINE")
    file.write_text('{"state": {}}')
    with pytest.raises(CheckpointError, match="norm_stats"):
        read_norm_stats(file)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_norm_stats(tmp_path / "none.json")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"123")
    with pytest.raises(CheckpointError, match="not readable as a safetensors file of statistics"):
        read_norm_stats(damaged)
    save_file({"action.q01": torch.zeros(3, 2)}, damaged)
    with pytest.raises(CheckpointError, match=r"action\.q01: expected one number a dimension"):
        read_norm_stats(damaged)


def step(data: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in data["steps"] if one["registry_name"] == name)
    return found


def test_action_statistics_are_the_unnormalisers(lerobot: Path) -> None:
    file = lerobot / "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    stats = load_file(file)
    stats["action.q99"] += 1
    stats["observation.state.q99"] += 5
    save_file(stats, file)
    read = read_checkpoint(lerobot).norm_stats
    assert read is not None
    assert np.array_equal(read.action["q99"], stats["action.q99"].numpy())
    assert not np.array_equal(read.state["q99"], stats["observation.state.q99"].numpy())


def test_a_feature_without_a_mode_is_left_as_it_is(lerobot: Path) -> None:
    edit(
        lerobot / "policy_postprocessor.json",
        lambda data: step(data, "unnormalizer_processor")["config"].update(norm_map={"STATE": "QUANTILES"}),
    )
    assert read_checkpoint(lerobot).normalization == {"state": "QUANTILES", "action": "IDENTITY"}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("normalizer_processor", {"config": {"norm_map": 3}}, r"steps\[3\]\.config\.norm_map: expected dict, got 3"),
        ("normalizer_processor", {"config": {"norm_map": {"STATE": 3}}}, "norm_map: expected an object of texts"),
        ("normalizer_processor", {"config": {"eps": 1e-6}}, "eps: expected 1e-08, got 1e-06"),
        ("normalizer_processor", {"config": []}, r"steps\[3\]\.config: expected dict, got \[\]"),
        ("normalizer_processor", {"state_file": 5}, r"steps\[3\]\.state_file: expected str, got 5"),
        ("rename_observations_processor", {"config": {"rename_map": ["a"]}}, "rename_map: expected dict"),
        ("relative_actions_processor", {"config": {"enabled": "false"}}, "enabled: expected bool, got 'false'"),
        ("relative_actions_processor", {"config": {"exclude_joints": "gripper"}}, "exclude_joints: expected list"),
        ("to_batch_processor", {"registry_name": "swap_arms_processor"}, r"steps\[1\]: expected .*swap_arms_processor"),
        ("to_batch_processor", {"registry_name": None, "class": "my.Step"}, r"steps\[1\]: expected an object whose"),
    ],
)
def test_wrong_processors_are_named(lerobot: Path, name: str, change: dict[str, Any], message: str) -> None:
    edit(lerobot / "policy_preprocessor.json", lambda data: step(data, name).update(change))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(lerobot)


def test_nulls_count_as_absent(lerobot: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        step(data, "rename_observations_processor")["config"] = None
        step(data, "normalizer_processor")["config"]["norm_map"] = None

    edit(lerobot / "policy_preprocessor.json", change)
    assert read_checkpoint(lerobot).normalization["state"] == "QUANTILES"


def test_a_lone_asset_of_another_robot_is_said(
    openpi: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # launch, which its pytest plugin imports, makes loggers that do not propagate.
    monkeypatch.setattr(logging.getLogger("pi05_ros.checkpoint.description"), "propagate", True)
    read_checkpoint(openpi, asset_id="droid")
    assert "these are the statistics of 'trossen', the robot profile expects 'droid'" in caplog.text
    caplog.clear()
    read_checkpoint(openpi, asset_id="trossen")
    assert not caplog.text


def test_several_assets_need_a_choice(openpi: Path) -> None:
    other = openpi / "assets/physical-intelligence/libero"
    other.mkdir(parents=True)
    (other / "norm_stats.json").write_bytes((openpi / "assets/trossen/norm_stats.json").read_bytes())
    assert "libero" in read_checkpoint(openpi, asset_id="physical-intelligence/libero").norm_stats.source  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"several norm stats .*trossen.* none named 'droid'"):
        read_checkpoint(openpi, asset_id="droid")
