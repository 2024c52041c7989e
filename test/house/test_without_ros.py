"""The package without ROS: importable where rclpy cannot be, and whole after pip install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKED = "rclpy launch launch_ros ament_index_python sensor_msgs std_msgs cv_bridge cv2 mujoco msgpack starlette"
PREAMBLE = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED.split()!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Refuse())
"""


def python(code: str, *, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that sees the package of that folder and no other."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path), "HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("room", ["model", "checkpoint", "engine", "policy", "robot"])
def test_room_imports_without_ros_opencv_or_a_web_framework(room, tmp_path):
    result = python(f"import pi05_ros, pi05_ros.{room}", cwd=tmp_path, path=ROOT)
    assert result.returncode == 0, result.stderr


def test_public_names_import_without_ros(tmp_path):
    result = python("from pi05_ros import ActionChunk, Observation, Policy; print(Policy)", cwd=tmp_path, path=ROOT)
    assert result.returncode == 0, result.stderr


def test_the_message_import_does_not_cost_the_import_of_torch(tmp_path):
    result = python("import pi05_ros; sys.exit('torch' in sys.modules)", cwd=tmp_path, path=ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("tool", ["policy_node", "aloha_sim"])
def test_ros_executables_say_in_one_sentence_that_ros_is_missing(tool, tmp_path):
    code = f"sys.argv = ['{tool}']\nfrom pi05_ros.tools.{tool} import main\nsys.exit(main())"
    result = python(code, cwd=tmp_path, path=ROOT)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "ROS 2" in result.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with what `pip install .` puts into site-packages."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name in ("pi05_ros", "config"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    return target


def test_pip_installs_every_module_and_yaml_file(installed):
    modules = {path.relative_to(ROOT) for path in (ROOT / "pi05_ros").rglob("*.py")}
    assert modules <= {path.relative_to(installed) for path in (installed / "pi05_ros").rglob("*.py")}
    files = {path.relative_to(ROOT) for path in (ROOT / "config").rglob("*.*")}
    assert files <= {path.relative_to(installed / "pi05_ros") for path in (installed / "pi05_ros/config").rglob("*.*")}
    assert (installed / "pi05_ros/py.typed").is_file()


def test_pip_installed_package_finds_its_robot_profiles(installed, tmp_path):
    code = """
from pi05_ros.policy.profile import config_folder, load_profile, profile_names
import pi05_ros
print(pi05_ros.__file__, config_folder(), load_profile("aloha_ros2").name, *profile_names())
"""
    result = python(code, cwd=tmp_path, path=installed)
    assert result.returncode == 0, result.stderr
    file, folder, name, *names = result.stdout.split()
    assert Path(file).is_relative_to(installed)
    assert Path(folder).is_relative_to(installed)
    assert name == "aloha_ros2"
    assert names == sorted(path.stem for path in (ROOT / "config/robots").glob("*.yaml"))


def test_pip_installs_the_executables(installed, tmp_path):
    result = subprocess.run(
        [sys.executable, installed / "bin/make_checkpoint", "--preset", "tiny", "--output", tmp_path / "tiny"],
        env={"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "tiny").glob("*.safetensors"))
