"""A scripted solution of the cube-transfer task: the right hand picks the cube up and gives it to the left one.

It knows where the cube is and plans with inverse kinematics; what it yields are plain joint targets, as a policy's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pi05_ros.sim.scene import ARMS, HOME_POSE, AlohaScene

OPEN, CLOSED = 0.057, 0.021  # finger, metres
MEETING = np.array([0.0, 0.5, 0.25])
UP, ASIDE = np.array([0.0, 0.0, 1.0]), np.array([1.0, 0.0, 0.0])


def rotation(axis: int, degrees: float) -> np.ndarray:
    """float64 [3, 3] about the x (0), y (1) or z (2) axis."""
    cosine, sine = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    matrix = np.eye(3)
    first, second = (axis + 1) % 3, (axis + 2) % 3
    matrix[[first, first, second, second], [first, second, first, second]] = [cosine, -sine, sine, cosine]
    return matrix


FACING = {"left": np.eye(3), "right": rotation(2, 180)}  # the arms stand face to face
LEVEL, DOWN, ROLLED = np.eye(3), rotation(1, 60), rotation(0, 90)


def reach(scene: AlohaScene, arm: str, position: np.ndarray, orientation: np.ndarray, start: np.ndarray) -> np.ndarray:
    """float64 [6] joints that bring the fingertips there: damped least squares on a copy of the scene."""
    mujoco, model = scene._mujoco, scene.model
    data = mujoco.MjData(model)
    joints, degrees = scene._position_index[arm][:6], scene._velocity_index[arm][:6]
    site = model.site(f"cali_{arm}_site1").id
    data.qpos[joints] = start
    for _ in range(100):
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        turn = orientation @ data.site_xmat[site].reshape(3, 3).T
        turn_error = 0.5 * np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
        error = np.concatenate([position - data.site_xpos[site], turn_error])
        full = np.zeros((6, model.nv))
        mujoco.mj_jacSite(model, data, full[:3], full[3:], site)
        jacobian = full[:, degrees]
        step = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 1e-4 * np.eye(6), error)
        data.qpos[joints] += np.clip(step, -0.1, 0.1)
    assert np.abs(error).max() < 1e-3, f"{arm} arm cannot reach {position}"
    return data.qpos[joints].copy()


def waypoints(scene: AlohaScene) -> Iterator[tuple[float, np.ndarray]]:
    """(seconds that the motion may take, float64 [14] targets at its end), for the scene as it is after a reset."""
    cube = scene.cube_position * [1, 1, 0]
    targets = np.array(HOME_POSE * len(ARMS))

    def move(arm: str, position: np.ndarray, orientation: np.ndarray, finger: float) -> None:
        at = 7 * ARMS.index(arm)
        targets[at : at + 6] = reach(scene, arm, position, FACING[arm] @ orientation, targets[at : at + 6])
        targets[at + 6] = finger

    move("right", cube + 0.15 * UP, DOWN, OPEN)
    yield 1.5, targets.copy()
    move("right", cube + 0.02 * UP, DOWN, OPEN)
    yield 1.0, targets.copy()
    targets[13] = CLOSED
    yield 0.8, targets.copy()
    move("right", MEETING, LEVEL, CLOSED)
    move("left", MEETING - 0.12 * ASIDE, ROLLED, OPEN)
    yield 1.5, targets.copy()
    move("left", MEETING, ROLLED, OPEN)
    yield 1.0, targets.copy()
    targets[6] = CLOSED
    yield 0.6, targets.copy()
    targets[13] = OPEN
    yield 0.5, targets.copy()
    move("right", MEETING + 0.15 * ASIDE, LEVEL, OPEN)
    yield 1.0, targets.copy()
