"""Robot profiles: the shipped ones are valid, mistakes in one are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pi05_ros.errors import ProfileError
from pi05_ros.policy.profile import config_folder, load_profile, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.description
    assert any(camera.slot == "base_0_rgb" for camera in profile.cameras)
    assert len(profile.joint_names) == profile.state_dim == len(profile.gripper_mask)


def test_aloha_dimensions() -> None:
    profile = load_profile("aloha_ros2")
    assert profile.joint_names[5:8] == ("left_wrist_rotate", "left_gripper", "right_waist")
    assert [index for index, gripper in enumerate(profile.gripper_mask) if gripper] == [6, 13]


def test_gripper_units() -> None:
    gripper = load_profile("aloha_ros2").arms[0].gripper
    assert gripper is not None
    assert gripper.state_to_unit(0.0440) == 0
    assert gripper.state_to_unit(0.0579) == pytest.approx(1)
    assert gripper.unit_to_command(0.5) == pytest.approx((0.6197 + 1.6214) / 2)


def test_a_generation_stands_for_its_numbers() -> None:
    older, newer = (load_profile(name).arms[0].gripper for name in ("aloha_ros1_bag", "aloha_ros2"))
    assert older is not None
    assert newer is not None
    assert (older.state_to_unit(0.01844), older.state_to_unit(0.05800)) == (0.0, pytest.approx(1.0))
    assert (older.unit_to_command(0.0), older.unit_to_command(1.0)) == (-0.6213, pytest.approx(1.4910))
    assert (older.range, newer.range) == ((0.0, 1.0), (0.0, 1.0))
    # The one taken for the other: a gripper that is half open would measure as far beyond closed.
    assert newer.state_to_unit((0.01844 + 0.05800) / 2) < -0.4


def test_a_gripper_that_is_passed_through_keeps_its_unit() -> None:
    profile = load_profile("trossen_ai")
    gripper = profile.arms[0].gripper
    assert gripper is not None
    assert (gripper.state_to_unit(0.03), gripper.unit_to_command(0.03)) == (0.03, 0.03)
    assert gripper.range == (0.0, 0.044)


NUMBERS = {"joint": "left_finger", "state_at_0": 0.0, "state_at_1": 1.0, "command_at_0": -1.0, "command_at_1": 1.0}


def without_gripper(arm: dict[str, Any]) -> dict[str, Any]:
    for name in ("gripper", "limits"):
        arm.pop(name)
    arm["command"].pop("gripper_topic")
    return arm


def edited(tmp_path: Path, change: Any) -> Path:
    data = yaml.safe_load((config_folder() / "robots/aloha_ros2.yaml").read_text())
    change(data)
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("arms"), "the file: missing arms"),
        (lambda d: d.update(contrl_hz=1), "unknown field contrl_hz; known are .*control_hz"),
        (lambda d: d.update(control_hz="fast"), "control_hz: expected a finite float, got 'fast'"),
        (lambda d: d.update(control_hz=float("nan")), "control_hz: expected a finite float, got nan"),
        (lambda d: d.update(command_hz=20), r"command_hz: expected 50 \(control_hz\) to 1000, got 20"),
        (lambda d: d.update(control_hz=0), "control_hz: expected a positive number, got 0"),
        (
            lambda d: d.update(transform="alhoa"),
            "transform: expected one of aloha, droid, libero, identity, got 'alhoa'",
        ),
        (lambda d: d.update(adapt_to_pi="yes please"), "adapt_to_pi: expected a bool"),
        (lambda d: d.update(cameras={}), "cameras: expected a list"),
        (lambda d: d.update(cameras=[]), "cameras: at least one is needed"),
        (lambda d: d["cameras"][0].update(slot="base"), r"cameras\[0\]\.slot: expected one of base_0_rgb"),
        (lambda d: d["cameras"][1].update(height=0), r"cameras\[1\]\.height: expected 1 to 16384 pixels, got 0"),
        (lambda d: d["cameras"][1].update(width="640"), r"cameras\[1\]\.width: expected a int, got '640'"),
        (lambda d: d["cameras"][1].update(name="cam_high"), "cameras: name cam_high is used twice"),
        (lambda d: d["cameras"][1].update(slot="base_0_rgb"), "cameras: slot base_0_rgb is used twice"),
        (lambda d: d["arms"][1].update(name="left"), "arms: dimension left_elbow, .* is used twice"),
        (lambda d: d["arms"][0].update(joints=[]), r"arms\[0\]\.joints: at least one is needed"),
        (lambda d: d["arms"][0].update(joints=[1]), r"arms\[0\]\.joints\[0\]: expected a str, got 1"),
        (lambda d: d["arms"][0].update(gripper={**NUMBERS, "state_at_1": 0.0}), "state_at_0 equals state_at_1"),
        (lambda d: d["arms"][0].update(gripper={**NUMBERS, "command_at_1": -1.0}), "command_at_0 equals command_at_1"),
        (
            lambda d: d["arms"][0]["gripper"].update(state_at_1=0.06),
            r"arms\[0\]\.gripper: expected either generation or passed_through or the numbers state_at_0, .*, "
            "got generation, state_at_1",
        ),
        (
            lambda d: d["arms"][0]["gripper"].update(passed_through=[0, 1]),
            r"arms\[0\]\.gripper: expected either .*, got generation, passed_through",
        ),
        (lambda d: d["arms"][0]["gripper"].pop("generation"), r"arms\[0\]\.gripper: expected .*, got none of them"),
        (
            lambda d: d["arms"][0]["gripper"].update(generation="aloha3"),
            r"arms\[0\]\.gripper: generation: expected one of aloha1, aloha2, got 'aloha3'",
        ),
        (lambda d: d["arms"][0]["gripper"].update(generation=[2]), r"generation: expected one of aloha1.*, got \[2\]"),
        (
            lambda d: d["arms"][0].update(gripper={"joint": "left_finger", "passed_through": [1, 0]}),
            r"arms\[0\]\.gripper: passed_through: expected two numbers, the least first, got \[1\.0, 0\.0\]",
        ),
        (
            lambda d: d["arms"][0].update(gripper={"joint": "left_finger", "passed_through": [0.0, 1.0]}),
            "transform: aloha has grippers of 0 to 1",
        ),
        (lambda d: d["arms"][0]["command"].pop("gripper_topic"), r"arms\[0\]\.command\.gripper_topic: needed"),
        (
            lambda d: d["arms"][0]["command"].update(type="joint_state"),
            r"arms\[0\]\.command\.gripper_topic: type joint_state has the gripper in the arm's message",
        ),
        (
            lambda d: without_gripper(d["arms"][0])["command"].update(gripper_topic="/gripper"),
            r"arms\[0\]\.command\.gripper_topic: the arm has no gripper",
        ),
        (lambda d: d["arms"].pop(), r"transform: aloha is for state and actions of \(14, 14\) dimensions"),
        (
            lambda d: without_gripper(d["arms"][0])["joints"].append("x"),
            "has a gripper after six joints",
        ),
        (lambda d: d.update(action_names=["a", "a"]), "action_names: a is used twice"),
        (lambda d: d.update(stale_after=60), "stale_after: expected at most 10, got 60"),
        (lambda d: d.update(control_hz=5000), "control_hz: expected at most 1000, got 5000"),
        (
            lambda d: d["arms"][1]["command"].update(d["arms"][0]["command"]),
            "arms: command topic /follower_left/commands/joint_group, .* is used twice",
        ),
        (
            lambda d: d["arms"][1].update(state_topic="/follower_left/joint_states"),
            "arms: joint /follower_left/joint_states elbow, .* is used twice",
        ),
        (lambda d: d["arms"][0]["limits"]["lower"].pop(), r"limits\.lower: expected 6 numbers, one a joint, got 5"),
        (
            lambda d: d["arms"][1]["limits"]["upper"].__setitem__(1, -2),
            r"arms\[0\]\.limits\.upper: expected more than lower \(-1\.85005\) for joint shoulder, got -2\.",
        ),
        (
            lambda d: d["arms"][0]["limits"]["velocity"].__setitem__(2, 0),
            r"arms\[0\]\.limits\.velocity: expected a positive number for joint elbow, got 0\.",
        ),
        (
            lambda d: d["arms"][0]["limits"]["upper"].__setitem__(0, float("inf")),
            r"limits\.upper\[0\]: expected a finite float, got inf",
        ),
        (lambda d: d["arms"][0]["limits"].pop("velocity"), r"arms\[0\]\.limits: missing velocity"),
        (lambda d: d["arms"][0]["limits"].update(gripper_speed=-1), r"limits\.gripper_speed: expected a positive"),
        (lambda d: d["arms"][0].pop("gripper"), r"limits\.gripper_speed: the arm has no gripper"),
        (lambda d: d.update(max_start_error=0), "max_start_error: expected a positive number, got 0"),
        (lambda d: d.update(max_limit_excess=7), "max_limit_excess: expected at most 6.28319, got 7"),
        (lambda d: d.update(reset_pose=[0.0, 1.0]), "reset_pose: expected 6 positions"),
        (
            lambda d: d["arms"][0]["command"].update(type="magic"),
            r"arms\[0\]\.command\.type: expected one of joint_traj",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: Any, message: str) -> None:
    path = edited(tmp_path, change)
    with pytest.raises(ProfileError, match=message) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("content", "message"), [("a: [", "not readable as YAML"), ("3", "expected a mapping, got 3")])
def test_files_that_are_no_profile(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "robot.yaml").write_text(content)
    with pytest.raises(ProfileError, match=message):
        load_profile(tmp_path / "robot.yaml")
    with pytest.raises(ProfileError, match=r"no robot profile .*the package has .*aloha_ros2"):
        load_profile(tmp_path / "other.yaml")
