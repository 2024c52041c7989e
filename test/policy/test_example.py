"""Every robot that ships, from its profile to a chunk: its example is an observation that a policy takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pi05_ros import Policy
from pi05_ros.checkpoint import make_checkpoint
from pi05_ros.errors import ProfileError
from pi05_ros.policy import load_profile, make_example, profile_names
from pi05_ros.policy.profile import CAMERA_SLOTS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that is of no robot yet, as pi05_base: 32 dimensions, cameras by slot."""
    folder = make_checkpoint("tiny", tmp_path_factory.mktemp("example") / "base")
    config = json.loads((folder / "config.json").read_text())
    images = {f"observation.images.{slot}": {"type": "VISUAL", "shape": [3, 224, 224]} for slot in CAMERA_SLOTS}
    config["input_features"] = {**images, "observation.state": {"type": "STATE", "shape": [32]}}
    config["output_features"]["action"]["shape"] = [32]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", profile_names())
def test_the_example_of_a_profile_gives_a_chunk(base: Path, name: str) -> None:
    profile = load_profile(name)
    with Policy.from_checkpoint(base, "cpu", "float32", name, normalization="none") as policy:
        chunk = policy.infer(make_example(profile), seed=1)
        assert chunk.actions.shape == (50, profile.action_dim)
        assert np.isfinite(chunk.actions).all()
        assert policy.metadata["robot"]["joint_names"] == list(profile.joint_names)
        assert policy.binding.fed_cameras == tuple(camera.name for camera in profile.cameras if camera.slot)


@pytest.mark.parametrize("name", profile_names())
def test_the_example_of_a_profile_is_within_its_limits(name: str) -> None:
    profile, example = load_profile(name), make_example(load_profile(name))
    assert set(example.images) == {camera.name for camera in profile.cameras}
    begin = 0
    for arm in profile.arms:
        joints = example.state[begin : begin + len(arm.joints)]
        begin += len(arm.dimension_names)
        if arm.limits is not None:
            assert (np.array(arm.limits.lower, np.float32) <= joints).all()
            assert (joints <= np.array(arm.limits.upper, np.float32)).all()
        if arm.gripper is not None:
            assert arm.gripper.range[0] < example.state[begin - 1] < arm.gripper.range[1]
    assert begin == len(example.state) == profile.state_dim


@pytest.mark.parametrize(
    ("name", "units", "gripper"),
    [
        ("aloha_ros1_bag", [*["rad"] * 6, "0..1"] * 2, "0 to 1, see the profile"),
        ("franka_droid", [*["rad"] * 7, "0..1"], "0 to 1, see the profile"),
        ("trossen_ai", [*["rad"] * 6, "0..0.044"] * 2, "as it is measured, see the profile"),
        ("libero", None, None),
    ],
)
def test_clients_are_told_the_units(base: Path, name: str, units: list[str] | None, gripper: str | None) -> None:
    with Policy.from_checkpoint(base, "cpu", "float32", name, normalization="none") as policy:
        assert (policy.metadata["robot"]["units"], policy.metadata["robot"]["gripper"]) == (units, gripper)


@pytest.mark.parametrize("name", ["cobot_magic", "trossen_ai"])
def test_what_is_not_in_pis_conventions_is_never_converted(base: Path, name: str) -> None:
    with pytest.raises(ProfileError, match="adapt_to_pi: only the aloha transform has it, not 'identity'"):
        Policy.from_checkpoint(base, "cpu", "float32", name, normalization="none", adapt_to_pi=True)
