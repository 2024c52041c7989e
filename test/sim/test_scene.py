"""The simulated robot without ROS: resets, servos, cameras, reward."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from pi05_ros.policy.profile import load_profile
from pi05_ros.sim import backend
from pi05_ros.sim.backend import SimulationError
from pi05_ros.sim.scene import ARM_JOINTS, CAMERAS, FINGERS, HOME_POSE, AlohaScene
from sim import handover

SECOND = 500  # physics steps
OPEN, CLOSED = 0.057, 0.021


@pytest.fixture(scope="module")
def shared_scene() -> Iterator[AlohaScene]:
    scene = AlohaScene(quality="fast")
    yield scene
    scene.close()


@pytest.fixture
def scene(shared_scene: AlohaScene) -> AlohaScene:
    shared_scene.reset(seed=0)
    return shared_scene


def run(scene: AlohaScene, steps: int) -> None:
    for _ in range(steps):
        scene.step()


def place_cube(scene: AlohaScene, position: np.ndarray) -> None:
    """Put the cube there and see what it touches."""
    index = scene.model.joint("red_box_joint").qposadr[0]
    scene.data.qpos[index : index + 3] = position
    scene._mujoco.mj_forward(scene.model, scene.data)


def test_reset_is_determined_by_the_seed(scene: AlohaScene) -> None:
    def after_a_while(seed: int) -> np.ndarray:
        scene.reset(seed)
        run(scene, 100)
        return scene.data.qpos.copy()

    first = after_a_while(3)
    other = after_a_while(4)
    np.testing.assert_array_equal(after_a_while(3), first)
    assert not np.array_equal(first, other)


def test_reset_puts_the_arms_home_and_the_cube_on_the_table(scene: AlohaScene) -> None:
    for arm in ("left", "right"):
        np.testing.assert_allclose(scene.positions(arm), [*HOME_POSE, -HOME_POSE[-1]])
        np.testing.assert_array_equal(scene.velocities(arm), np.zeros(8))
    places = []
    for seed in range(20):
        scene.reset(seed)
        places.append(scene.cube_position)
    assert (np.array(places) >= [0.0, 0.4, 0.05]).all()
    assert (np.array(places) <= [0.2, 0.6, 0.05]).all()
    run(scene, SECOND // 2)
    assert scene.cube_position[2] == pytest.approx(0.02, abs=1e-3)  # half an edge above the table top


def test_the_seed_gives_the_cube_place_that_gym_aloha_draws(scene: AlohaScene) -> None:
    np.testing.assert_allclose(scene.cube_position[:2], [0.10976270, 0.54303787], atol=1e-8)


def test_one_step_advances_time_by_one_timestep(scene: AlohaScene) -> None:
    assert scene.timestep == 0.002
    assert scene.time == 0.0
    for count in range(1, 6):
        scene.step()
        assert scene.time == pytest.approx(count * scene.timestep)


@pytest.mark.parametrize("joint", ARM_JOINTS)
def test_a_commanded_joint_reaches_its_target_and_no_other_moves(scene: AlohaScene, joint: str) -> None:
    index = ARM_JOINTS.index(joint)
    targets = np.array(HOME_POSE * 2)
    targets[7 + index] += 0.3
    scene.set_targets(targets)
    run(scene, 2 * SECOND)
    np.testing.assert_allclose(scene.positions("right")[:6], targets[7:13], atol=0.02)
    np.testing.assert_allclose(scene.positions("left")[:6], targets[:6], atol=0.02)


def test_the_gripper_command_moves_both_fingers_and_stops_at_their_limits(scene: AlohaScene) -> None:
    targets = np.array(HOME_POSE * 2)
    targets[6], targets[13] = 1.0, -1.0  # far beyond open, far beyond closed
    scene.set_targets(targets)
    run(scene, 2 * SECOND)
    np.testing.assert_allclose(scene.positions("left")[6:], [OPEN, -OPEN], atol=0.003)
    np.testing.assert_allclose(scene.positions("right")[6:], [CLOSED, -CLOSED], atol=0.003)
    assert FINGERS == ("left_finger", "right_finger")


def test_the_gripper_units_of_the_robot_profile_close_and_open_the_hand(scene: AlohaScene) -> None:
    for arm, unit in zip(load_profile("aloha_sim").arms, (0.0, 1.0), strict=True):
        assert arm.gripper is not None
        targets = np.array(HOME_POSE * 2)
        targets[[6, 13]] = arm.gripper.unit_to_command(unit)
        scene.set_targets(targets)
        run(scene, 2 * SECOND)
        assert arm.gripper.state_to_unit(scene.positions(arm.name)[6]) == pytest.approx(unit, abs=0.15)
        # Half way is half way, in and out alike.
        targets[[6, 13]] = arm.gripper.unit_to_command(0.5)
        scene.set_targets(targets)
        run(scene, 2 * SECOND)
        assert arm.gripper.state_to_unit(scene.positions(arm.name)[6]) == pytest.approx(0.5, abs=0.07)


@pytest.mark.parametrize("targets", [[0.0] * 13, [0.0] * 15, [*[0.0] * 13, np.nan], [*[0.0] * 13, np.inf]])
def test_wrong_targets_are_refused(scene: AlohaScene, targets: list[float]) -> None:
    with pytest.raises(SimulationError, match="targets: expected 14 finite numbers"):
        scene.set_targets(targets)


@pytest.mark.parametrize("camera", CAMERAS)
def test_a_camera_shows_the_scene_and_sees_the_arms_move(scene: AlohaScene, camera: str) -> None:
    before = scene.render(camera, 120, 160)
    assert before.shape == (120, 160, 3)
    assert before.dtype == np.uint8
    assert before.std() > 10
    np.testing.assert_array_equal(scene.render(camera, 120, 160), before)  # nothing moved, nothing changes
    targets = np.array(HOME_POSE * 2)
    targets[[1, 8]] += 0.4
    scene.set_targets(targets)
    run(scene, SECOND // 2)
    changed = (scene.render(camera, 120, 160) != before).any(axis=-1)
    assert changed.mean() > 0.05


def test_the_top_camera_sees_the_red_cube_where_it_lies(scene: AlohaScene) -> None:
    def column_of_red() -> float:
        image = scene.render("top", 240, 320).astype(int)
        return float(np.mean(np.nonzero((image[..., 0] > 150) & (image[..., 1] < 60))[1]))

    place_cube(scene, np.array([-0.1, 0.6, 0.02]))
    left = column_of_red()
    place_cube(scene, np.array([0.1, 0.6, 0.02]))
    assert left < 160 < column_of_red()


def test_images_larger_than_the_scene_was_made_for(scene: AlohaScene) -> None:
    assert scene.render("top", 720, 1280).shape == (720, 1280, 3)


def test_an_unknown_camera_is_named_and_the_known_ones_listed(scene: AlohaScene) -> None:
    with pytest.raises(SimulationError, match=r"top.*got 'wrist'"):
        scene.render("wrist", 120, 160)


@pytest.mark.parametrize("seed", [0, 1])
def test_joint_targets_alone_solve_the_task_and_the_reward_tells_how_far_it_is(scene: AlohaScene, seed: int) -> None:
    scene.reset(seed)
    assert scene.reward == 0
    rewards = []
    present = np.array(HOME_POSE * 2)
    for seconds, targets in handover.waypoints(scene):
        steps = int(seconds * SECOND)
        for step in range(steps):
            scene.set_targets(present + (targets - present) * min(1.0, step / (0.8 * steps)))
            scene.step()
        rewards.append(scene.reward)
        present = targets
    # above the cube, around it, grasped (the table may or may not be left), lifted, the left hand around it,
    # grasped, let go, withdrawn. A contact may flicker for a step, so the last two are what the hold is judged by.
    assert rewards[:2] == [0, 0]
    assert rewards[2] in (1, 2)
    assert rewards[3] == 2
    assert scene.cube_position[2] > 0.2
    assert 4 in rewards[-3:]


def test_a_cube_that_the_hands_touch_on_the_table_is_not_lifted(scene: AlohaScene) -> None:
    """Rewards 1 and 3, with the cube moved to a finger that stands on the table."""
    targets = np.array(HOME_POSE * 2)
    for arm, at in (("left", 0), ("right", 7)):
        place = np.array([-0.1 if arm == "left" else 0.1, 0.5, 0.03])
        orientation = handover.FACING[arm] @ handover.DOWN
        targets[at : at + 6] = handover.reach(scene, arm, place, orientation, targets[at : at + 6])
    scene.set_targets(targets)
    place_cube(scene, np.array([0.0, 0.8, 0.02]))
    run(scene, 2 * SECOND)
    for arm, reward in (("right", 1), ("left", 3)):
        tip = scene.data.site(f"cali_{arm}_site1").xpos
        # Each finger of a closed hand is met somewhere along this line across it, standing on the table.
        across = np.linspace(-0.03, 0.03, 13)
        seen = set()
        for offset in across:
            place_cube(scene, np.array([tip[0], tip[1] + offset, 0.0199]))
            seen.add(scene.reward)
        assert seen <= {0, reward}
        assert reward in seen


def test_without_the_scene_files_one_sentence_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "SCENE_PACKAGE", "no-such-package")
    with pytest.raises(SimulationError, match=r"pip install 'pi05_ros\[sim\]'"):
        backend.scene_path()


def test_without_mujoco_one_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)  # as if it were not installed
    with pytest.raises(SimulationError, match=r"pip install 'pi05_ros\[sim\]'"):
        backend.load_mujoco()


def test_the_renderer_is_looked_for_until_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    working = backend.find_renderer()
    monkeypatch.setattr(backend, "RENDERERS", ("nonsense", working))
    assert backend.find_renderer() == working
    monkeypatch.setattr(backend, "RENDERERS", ("nonsense",))
    with pytest.raises(SimulationError, match=r"nonsense: .*invalid value.*apt-get install libegl1 libosmesa6"):
        backend.find_renderer()
