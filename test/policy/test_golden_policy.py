"""Transforms and the whole policy against what LeRobot and openpi gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_cases import ACTIONS_LIMIT, GOLDEN, ROBOT_LIMIT, case, close, names
from safetensors.numpy import load_file

from pi05_ros import Observation, Policy
from pi05_ros.checkpoint import RelativeActions, read_checkpoint
from pi05_ros.engine.images import image_to_model, resize_openpi
from pi05_ros.errors import ObservationError
from pi05_ros.policy.binding import bind
from pi05_ros.policy.normalization import Normalizer
from pi05_ros.policy.prompt import discretize, prompt_text
from pi05_ros.policy.transforms import AlohaTransform, absolute_actions

TRANSFORMS = GOLDEN / "transforms"
RESIZES = json.loads((TRANSFORMS / "transforms.json").read_text())["resize"]


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    with Policy.from_checkpoint(
        GOLDEN / "lerobot_fp32", device="cpu", precision="float32", truncate_prompt=True
    ) as policy:
        yield policy


@pytest.mark.parametrize("name", names("lerobot_fp32/policy_cases.json"))
def test_policy_equals_lerobot(policy: Policy, name: str) -> None:
    described, tensors = (
        case("lerobot_fp32/policy_cases.json", name),
        load_file(GOLDEN / "lerobot_fp32/policy_cases.safetensors"),
    )
    images = {camera: tensors[f"{name}.image.{camera}"] for camera in described["cameras"]}
    state = tensors[f"{name}.state"]
    for camera, image in images.items():
        expected = tensors[f"{name}.model_image.{camera}"]
        assert np.abs(image_to_model(image, 56, "lerobot").numpy() - expected).max() <= 2e-6
    normalized = policy._normalizers["state"].normalize(state)
    assert np.abs(normalized - tensors[f"{name}.normalized_state"]).max() <= 2e-6
    assert prompt_text(described["prompt"], normalized) == described["text"]
    observation = Observation(images, state, described["prompt"])
    tokens, mask = tensors[f"{name}.tokens"].reshape(-1), tensors[f"{name}.token_mask"].reshape(-1)
    assert np.array_equal(policy._translator._tokens(observation, normalized), tokens[mask])

    chunk = policy.infer(observation, noise=tensors[f"{name}.noise"], num_steps=described["num_steps"])
    assert close(chunk.model_actions, tensors[f"{name}.model_actions"], ACTIONS_LIMIT)
    assert close(chunk.actions, tensors[f"{name}.actions"], ROBOT_LIMIT)

    given = Observation(images, state, tokens=tokens, token_mask=mask)
    again = policy.infer(given, noise=tensors[f"{name}.noise"], num_steps=described["num_steps"])
    assert np.array_equal(again.actions, chunk.actions), "tokens of the caller's are as good as a prompt"


def test_a_prompt_that_does_not_fit_is_an_error() -> None:
    described = case("lerobot_fp32/policy_cases.json", "long_prompt")
    tensors = load_file(GOLDEN / "lerobot_fp32/policy_cases.safetensors")
    images = {camera: tensors[f"long_prompt.image.{camera}"] for camera in described["cameras"]}
    with (
        Policy.from_checkpoint(GOLDEN / "lerobot_fp32", device="cpu", precision="float32") as policy,
        pytest.raises(ObservationError, match="prompt: with the state it has 132 tokens, the model takes at most 128"),
    ):
        policy.infer(Observation(images, tensors["long_prompt.state"], described["prompt"]))


@pytest.mark.parametrize("described", RESIZES, ids=lambda one: one["name"])
def test_resize(described: dict[str, object]) -> None:
    name, size = str(described["name"]), int(str(described["size"]))
    image = load_file(TRANSFORMS / "resize_lerobot.safetensors")[f"{name}.input"]
    expected = load_file(TRANSFORMS / "resize_lerobot.safetensors")[f"{name}.lerobot"]
    assert np.abs(image_to_model(image, size, "lerobot").numpy() - expected).max() <= 2e-6
    pil = load_file(TRANSFORMS / "resize_openpi_client.safetensors")[f"{name}.openpi_client"]
    assert np.array_equal(resize_openpi(image, size), pil)
    scaled = torch.from_numpy(pil.astype(np.float32) / 255.0 * 2.0 - 1.0).permute(2, 0, 1)
    assert torch.equal(image_to_model(image, size, "openpi"), scaled)


@pytest.mark.parametrize("mode", ["QUANTILES", "MEAN_STD", "MIN_MAX"])
def test_lerobot_normalisation(mode: str) -> None:
    golden = load_file(TRANSFORMS / "normalize_lerobot.safetensors")
    stats = {name.removeprefix("stats."): value for name, value in golden.items() if name.startswith("stats.")}
    normalizer = Normalizer(mode, stats, "lerobot")
    for actual, name in (
        (normalizer.normalize(golden["x"]), "normalized"),
        (normalizer.unnormalize(golden["model"]), "unnormalized"),
    ):
        expected = golden[f"{mode}.{name}"]
        assert actual.dtype == np.float32
        # Relative per value: the constant dimension is blown up by 1e8.
        assert (np.abs(actual - expected) <= 2e-6 * np.maximum(1.0, np.abs(expected))).all()


@pytest.mark.parametrize(("mode", "name"), [("QUANTILES", "quantile"), ("MEAN_STD", "mean_std")])
def test_openpi_normalisation(mode: str, name: str) -> None:
    golden = load_file(TRANSFORMS / "normalize_openpi.safetensors")
    stats = {key.removeprefix("stats."): value for key, value in golden.items() if key.startswith("stats.")}
    normalizer = Normalizer(mode, stats, "openpi")
    for given, suffix in (("x", ""), ("x_float32", "_float32"), ("x_short", "_short")):
        actual = normalizer.normalize(golden[given])
        assert actual.dtype == np.float64
        assert np.abs(actual - golden[f"{name}.normalized{suffix}"]).max() <= 1e-12
    actual, expected = normalizer.unnormalize(golden["model"]), golden[f"{name}.unnormalized"]
    assert np.abs(actual - expected)[:, :14].max() <= 1e-12
    # Beyond the statistics openpi assumes a deviation of 1, plus its eps; nobody reads these dimensions.
    assert np.allclose(actual[:, 14:], expected[:, 14:], rtol=2e-6)


@pytest.mark.parametrize("dialect", ["openpi", "lerobot"])
def test_state_text(dialect: str) -> None:
    golden = json.loads((TRANSFORMS / f"text_{dialect}.json").read_text())
    assert discretize(np.array(golden["state"], dtype=np.float32)).tolist() == golden["bins"]
    for one in golden["prompts"]:
        assert prompt_text(one["prompt"], np.array(one["state"], dtype=np.float32)) == one["text"]


def test_aloha_transform() -> None:
    golden = load_file(TRANSFORMS / "aloha_openpi.safetensors")
    adapted, plain = AlohaTransform(adapt_to_pi=True), AlohaTransform(adapt_to_pi=False)

    def same(actual: np.ndarray, name: str) -> None:
        assert np.abs(actual - golden[name]).max() <= 1e-12, name

    same(adapted.state_to_model(golden["state"]), "state_pi")
    same(plain.state_to_model(golden["state"]), "state_not_adapted")
    same(adapted.state_to_model(golden["state_sweep"]), "state_sweep_pi")
    same(adapted.actions_to_robot(golden["absolute_actions_pi"][:, :14]), "actions_out")
    same(adapted.actions_to_robot(golden["model_actions_pi"][:, :14]), "actions_out_without_delta")
    same(adapted.actions_to_model(golden["train_actions"]), "train_actions_pi")
    mask = golden["delta_mask"]
    absolute = absolute_actions(golden["model_actions_pi"][:, :14], golden["state_pi"], mask)
    assert np.abs(absolute - golden["absolute_actions_pi"][:, :14]).max() <= 1e-12
    same(plain.actions_to_robot(golden["model_actions_pi"][:, :14]), "actions_out_not_adapted")


def test_lerobot_relative_actions() -> None:
    golden = load_file(TRANSFORMS / "relative_lerobot.safetensors")
    described = json.loads((TRANSFORMS / "transforms.json").read_text())
    checkpoint = replace(
        read_checkpoint(GOLDEN / "lerobot_fp32"),
        relative_actions=RelativeActions(
            True, tuple(described["relative_exclude_joints"]), tuple(described["relative_action_names"])
        ),
    )
    mask = bind(checkpoint, None, raw=False, adapt_to_pi=None, delta_actions=None).delta_mask
    assert mask is not None
    assert np.flatnonzero(~mask).tolist() == [6, 13], "left_Gripper and right_gripper stay absolute"
    assert np.abs(absolute_actions(golden["relative"], golden["state"], mask) - golden["back"]).max() <= 2e-6
    assert np.abs(golden["back"] - golden["absolute"]).max() <= 2e-6


def test_gripper_goldens() -> None:
    state = np.zeros((3, 14))
    state[:, 6] = [0, 0.5, 1]
    assert AlohaTransform(True).state_to_model(state)[:, 6] == pytest.approx(
        [-1.0798655475132917, -0.1400559217021429, 0.945652797407483], abs=1e-12
    )
    actions = np.zeros((2, 14))
    actions[:, 13] = [0, 1]
    assert AlohaTransform(True).actions_to_robot(actions)[:, 13] == pytest.approx(
        [0.5533778345878898, 1.0267954362543197], abs=1e-12
    )
