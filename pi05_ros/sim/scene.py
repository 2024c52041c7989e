"""The simulated robot and its world: two ViperX arms, a table, a red cube, and cameras. MuJoCo and numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from pi05_ros.sim.backend import SimulationError, load_mujoco, scene_path

ARMS = ("left", "right")
ARM_JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")
FINGERS = ("left_finger", "right_finger")
JOINT_NAMES = ARM_JOINTS + FINGERS
"""What is measured of one arm. The right finger slides the other way: closed or open, it is minus the left one."""

COMMAND_NAMES = (*ARM_JOINTS, "left_finger")
"""What is commanded of one arm. The last one moves both fingers, as the one motor of a real gripper does."""

CAMERAS = ("top", "left_wrist", "right_wrist")
"""The cameras of an ALOHA. The scene has all three, the wrist cameras on the gripper links."""

# Where gym-aloha starts its episodes: arms above the table, grippers a tenth open. Radians; finger in metres.
HOME_POSE = (0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.02239)

# Where gym-aloha drops the cube: x and y of the table in metres; z lets it fall 3 cm.
CUBE_LOW = (0.0, 0.4, 0.05)
CUBE_HIGH = (0.2, 0.6, 0.05)

CUBE_GEOM = "red_box"
TABLE_GEOM = "table"
# gym-aloha's reward looks at one finger of each hand: with the cube between both, either would do.
HAND_GEOMS = {"left": "vx300s_left/10_left_gripper_finger", "right": "vx300s_right/10_right_gripper_finger"}
MAX_REWARD = 4

RenderQuality = Literal["full", "fast"]


class AlohaScene:
    """One episode at a time of the cube-transfer task: the right hand picks the cube up, the left hand takes it.

    All arrays are in SI units and ordered as ``JOINT_NAMES`` or ``COMMAND_NAMES`` say, one arm after the other in the
    order of ``ARMS``. Rendering binds to the thread that renders first; physics may run in any one thread at a time.

    seed: of the first episode, see ``reset``.
    quality: "full" renders as the scene asks (4096 pixel shadow maps, 4 samples a pixel), as the pictures of
        gym-aloha's data sets were; "fast" has coarser shadows and no antialiasing, which halves the time on a CPU.

    Raises SimulationError: MuJoCo, the scene or a renderer is missing.
    """

    def __init__(self, seed: int = 0, quality: RenderQuality = "full") -> None:
        self._mujoco = load_mujoco()
        self.model = self._mujoco.MjModel.from_xml_path(str(scene_path()))
        if quality == "fast":
            self.model.vis.quality.shadowsize = 1024
            self.model.vis.quality.offsamples = 0
        self.data = self._mujoco.MjData(self.model)
        self._renderers: dict[tuple[int, int], object] = {}

        joints = [[self.model.joint(f"vx300s_{arm}/{name}") for name in JOINT_NAMES] for arm in ARMS]
        self._position_index = {arm: [j.qposadr[0] for j in row] for arm, row in zip(ARMS, joints, strict=True)}
        self._velocity_index = {arm: [j.dofadr[0] for j in row] for arm, row in zip(ARMS, joints, strict=True)}
        # The scene's motors have no names; each is found through the joint that it moves.
        motor_of = {int(self.model.actuator_trnid[motor, 0]): motor for motor in range(self.model.nu)}
        self._motor_index = [motor_of[joint.id] for row in joints for joint in row]
        self._cube_index = self.model.joint("red_box_joint").qposadr[0]
        self._geom = {name: self.model.geom(name).id for name in (CUBE_GEOM, TABLE_GEOM, *HAND_GEOMS.values())}
        self.reset(seed)

    @property
    def timestep(self) -> float:
        """Seconds of one physics step (the scene leaves MuJoCo's default of 2 ms)."""
        return float(self.model.opt.timestep)

    @property
    def time(self) -> float:
        """Seconds since the reset."""
        return float(self.data.time)

    def reset(self, seed: int) -> None:
        """Arms to the home pose, the cube to a random place on the table.

        The place is drawn as gym-aloha draws it, so the same seed gives the same episode there and here.
        """
        self._mujoco.mj_resetData(self.model, self.data)
        cube = np.random.RandomState(seed).uniform(CUBE_LOW, CUBE_HIGH)
        self.data.qpos[self._cube_index : self._cube_index + 7] = [*cube, 1.0, 0.0, 0.0, 0.0]
        self.set_targets(HOME_POSE * len(ARMS))
        for arm in ARMS:
            self.data.qpos[self._position_index[arm]] = [*HOME_POSE, -HOME_POSE[-1]]
        self._mujoco.mj_forward(self.model, self.data)

    def set_targets(self, targets: Sequence[float] | np.ndarray) -> None:
        """Where the position servos are to go from now on. Like real servos, they stop at their joint limits.

        targets: [14] ``COMMAND_NAMES`` of the left arm, then of the right one; rad, the finger in metres
            (0.021 closed to 0.057 open).

        Raises SimulationError: not 14 finite numbers.
        """
        commands = np.asarray(targets, dtype=np.float64)
        expected = (len(ARMS) * len(COMMAND_NAMES),)
        if commands.shape != expected or not np.isfinite(commands).all():
            raise SimulationError(f"targets: expected {expected[0]} finite numbers, got {targets!r}.")
        per_arm = commands.reshape(len(ARMS), -1)
        self.data.ctrl[self._motor_index] = np.hstack([per_arm, -per_arm[:, -1:]]).ravel()

    def step(self) -> None:
        """Advance the world by one timestep."""
        self._mujoco.mj_step(self.model, self.data)

    def positions(self, arm: str) -> np.ndarray:
        """float64 [8] in the order of ``JOINT_NAMES``, rad, fingers in metres."""
        return self.data.qpos[self._position_index[arm]]

    def velocities(self, arm: str) -> np.ndarray:
        """float64 [8] in the order of ``JOINT_NAMES``, rad/s, fingers in m/s."""
        return self.data.qvel[self._velocity_index[arm]]

    @property
    def cube_position(self) -> np.ndarray:
        """float64 [3] centre of the cube, metres; z is above the table top."""
        return self.data.qpos[self._cube_index : self._cube_index + 3].copy()

    def render(self, camera: str, height: int, width: int) -> np.ndarray:
        """What a camera of the scene sees now: uint8 RGB [height, width, 3].

        Raises SimulationError: the scene has no camera of that name, or nothing can render.
        """
        if camera not in (known := [self.model.camera(i).name for i in range(self.model.ncam)]):
            raise SimulationError(f"camera: the scene has {', '.join(known)}; got {camera!r}.")
        if (height, width) not in self._renderers:
            self.model.vis.global_.offheight = max(height, self.model.vis.global_.offheight)
            self.model.vis.global_.offwidth = max(width, self.model.vis.global_.offwidth)
            try:
                self._renderers[height, width] = self._mujoco.Renderer(self.model, height, width)
            except Exception as error:  # OpenGL's own zoo of exceptions
                raise SimulationError(f"MuJoCo cannot render {width} x {height} images: {error}") from error
        renderer = self._renderers[height, width]
        renderer.update_scene(self.data, camera)  # type: ignore[attr-defined]
        return renderer.render()  # type: ignore[attr-defined]

    @property
    def reward(self) -> int:
        """How far the task is: 1 the right hand touches the cube, 2 it lifted it, 3 the left hand touches it, 4 the
        left hand holds it off the table."""
        contacts = self.data.contact
        pairs = np.stack([contacts.geom1, contacts.geom2], axis=1)
        touching = set(pairs[(pairs == self._geom[CUBE_GEOM]).any(axis=1)].ravel().tolist())
        lifted = self._geom[TABLE_GEOM] not in touching
        if self._geom[HAND_GEOMS["left"]] in touching:
            return 4 if lifted else 3
        if self._geom[HAND_GEOMS["right"]] in touching:
            return 2 if lifted else 1
        return 0

    @property
    def success(self) -> bool:
        return self.reward == MAX_REWARD

    def close(self) -> None:
        """Free the renderers, in the thread that used them."""
        for renderer in self._renderers.values():
            renderer.close()  # type: ignore[attr-defined]
        self._renderers.clear()
