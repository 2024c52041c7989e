"""scripts/setup.sh: what it says when something is missing or fails. The good case is what runs these tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path) -> Path:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/apt-get").write_text("#!/bin/sh\necho a test must not install anything >&2\nexit 1\n")
    (tmp_path / "fake/apt-get").chmod(0o755)
    return tmp_path


def setup(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it as on a machine without ROS and without access to a package index."""
    path = f"{checkout / 'fake'}:/usr/sbin:/usr/bin:/sbin:/bin"
    plain = {"PATH": path, "HOME": str(checkout), "PYTHON": sys.executable}
    return subprocess.run(
        [checkout / "scripts/setup.sh", *arguments],
        env=plain | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def without_cmake(tmp_path) -> str:
    """A PATH on which cmake is missing, for a user who is not root."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for directory in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        for program in Path(directory).iterdir():
            link = folder / program.name
            if program.name != "cmake" and not link.is_symlink():
                link.symlink_to(program)
    (folder / "id").unlink()
    (folder / "id").write_text("#!/bin/sh\necho 1000\n")
    (folder / "id").chmod(0o755)
    return str(folder)


def test_help_names_every_variable_that_is_read(checkout):
    result = setup(checkout, "--help")
    assert result.returncode == 0
    for name in ("PYTHON", "PI05_ROS_TORCH", "PI05_ROS_ACCEPT_ISAACSIM"):
        assert name in result.stdout


def test_an_unknown_option_is_refused(checkout):
    assert setup(checkout, "--fast").returncode == 2


def test_a_failed_download_says_which_step_and_what_and_the_next_run_continues(checkout):
    failed = setup(checkout)
    assert failed.returncode == 1
    assert "step 3 of 6 failed: a present pip" in failed.stderr
    assert "No matching distribution found for pip>=25" in failed.stderr
    again = setup(checkout)
    assert again.returncode == 1
    assert "Python environment .venv: up to date" in again.stdout


def test_missing_system_packages_are_one_apt_line_for_a_user(checkout, without_cmake):
    result = setup(checkout, PATH=without_cmake)
    assert result.returncode == 1
    assert "apt-get install -y --no-install-recommends cmake" in result.stderr
    assert not (checkout / ".venv").exists()


def test_an_unusable_python_is_an_error_that_says_which_are_usable(checkout):
    result = setup(checkout, PYTHON="/bin/false")
    assert result.returncode == 1
    assert "Python 3.10 to 3.13 is needed" in result.stderr


def test_a_sourced_ros_without_rclpy_is_not_silently_replaced(checkout):
    result = setup(checkout, AMENT_PREFIX_PATH="/opt/ros/jazzy", ROS_DISTRO="jazzy")
    assert result.returncode == 1
    assert "cannot import its rclpy" in result.stderr


def test_a_venv_of_the_users_own_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv/mine").touch()
    result = setup(checkout)
    assert result.returncode == 1
    assert "was not made by this script" in result.stderr
    assert (checkout / ".venv/mine").exists()


def test_only_the_ros_packages_leave_the_proprietary_wheel(tmp_path):
    root = "isaacsim/exts/isaacsim.ros2.core/jazzy"
    wanted = {
        f"{root}/rclpy/launch_ros/__init__.py": "launch_ros/__init__.py",
        f"{root}/rclpy/launch_ros-0.26.12-py3.12.egg-info/entry_points.txt": (
            "launch_ros-0.26.12-py3.12.egg-info/entry_points.txt"
        ),
        f"{root}/share/composition_interfaces/package.xml": "src/composition_interfaces/package.xml",
        f"{root}/share/composition_interfaces/srv/LoadNode.srv": "src/composition_interfaces/srv/LoadNode.srv",
    }
    unwanted = [
        "isaacsim/__init__.py",
        "isaacsim_ros2-6.2.0.0.dist-info/LICENSE.txt",
        f"{root}/rclpy/rclpy/__init__.py",
        f"{root}/rclpy/launch_rosette/__init__.py",
        f"{root}/lib/librcl.so",
        f"{root}/share/composition_interfaces/srv/LoadNode.idl",
    ]
    wheel, target = tmp_path / "isaacsim_ros2.whl", tmp_path / "target"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*wanted, *unwanted]:
            archive.writestr(name, name)
    subprocess.run([sys.executable, ROOT / "scripts/unpack_launch.py", wheel, target], check=True)
    found = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert found == {path: name for name, path in wanted.items()}
