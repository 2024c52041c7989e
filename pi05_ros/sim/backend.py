"""MuJoCo and the ALOHA scene: found at run time, since both are optional and the scene is not ours to ship."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from pi05_ros.errors import Pi05Error

logger = logging.getLogger(__name__)

INSTALL_HINT = "install the simulator with: pip install 'pi05_ros[sim]'"

RENDERERS = ("egl", "osmesa")
"""Off-screen renderers, in the order in which they are tried: EGL uses a GPU if there is one, OSMesa never does."""

SCENE_PACKAGE = "gym-aloha"
SCENE_FILE = "gym_aloha/assets/bimanual_viperx_transfer_cube.xml"


class SimulationError(Pi05Error):
    """The simulator cannot run: something is not installed, cannot render, or was asked for what it does not have."""


def load_mujoco() -> ModuleType:
    """Import MuJoCo with a renderer that works without a display.

    MuJoCo reads MUJOCO_GL once, when it is first imported, so the choice is made here, before that. A value that the
    user has set is obeyed.

    Raises SimulationError: MuJoCo is not installed, or nothing can render on this machine.
    """
    if "mujoco" not in sys.modules and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = find_renderer()
    try:
        import mujoco
    except ModuleNotFoundError as error:
        raise SimulationError(f"The simulated robot needs MuJoCo ({error}); {INSTALL_HINT}.") from error
    except Exception as error:  # whatever a broken OpenGL raises on import
        raise SimulationError(
            f"MuJoCo does not load with MUJOCO_GL={os.environ.get('MUJOCO_GL')!r} ({error}); unset MUJOCO_GL to let a "
            "working renderer be chosen."
        ) from error
    return mujoco


def find_renderer() -> str:
    """The first of ``RENDERERS`` that draws on this machine.

    Each is tried in a process of its own: PyOpenGL binds itself to one platform on import, and there is no way back.

    Raises SimulationError: none does, or MuJoCo is not installed.
    """
    if importlib.util.find_spec("mujoco") is None:
        raise SimulationError(f"The simulated robot needs MuJoCo; {INSTALL_HINT}.")
    complaints = []
    for name in RENDERERS:
        command = [sys.executable, "-c", "import mujoco; mujoco.GLContext(16, 16).make_current()"]
        environment = {**os.environ, "MUJOCO_GL": name}
        try:
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        except subprocess.CalledProcessError as error:
            complaints.append(f"{name}: {(error.stderr.strip().splitlines() or ['no message'])[-1]}")
        except subprocess.TimeoutExpired:
            complaints.append(f"{name}: no answer within a minute")
        else:
            logger.debug("MuJoCo renders through %s", name)
            return name
    raise SimulationError(
        f"MuJoCo can render neither through EGL nor through OSMesa ({'; '.join(complaints)}); install one of them, "
        "for example with: apt-get install libegl1 libosmesa6"
    )


def scene_path() -> Path:
    """The MuJoCo XML of the cube-transfer scene in the installed gym-aloha.

    Only its files are wanted: importing gym_aloha would pull in dm_control and gymnasium.

    Raises SimulationError: gym-aloha is not installed, or has no such file.
    """
    try:
        files = importlib.metadata.files(SCENE_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise SimulationError(
            f"The simulated robot needs the scene files of {SCENE_PACKAGE}; {INSTALL_HINT}."
        ) from error
    for file in files:
        if file.as_posix() == SCENE_FILE and (path := Path(str(file.locate()))).is_file():
            return path
    raise SimulationError(
        f"The installed {SCENE_PACKAGE} {importlib.metadata.version(SCENE_PACKAGE)} has no {SCENE_FILE}."
    )
