"""env.sh gives a bare shell everything: Python, ROS, the built package and its executables."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELLS = [shell for shell in ("bash", "zsh") if shutil.which(shell)]


def run(shell: str, script: str, cwd: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A script in a shell that knows nothing of the environment of this test."""
    plain = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd)}
    return subprocess.run(
        [shell, *options, "-c", script], cwd=cwd, env=plain, capture_output=True, text=True, timeout=120
    )


@pytest.mark.needs_launch
@pytest.mark.parametrize("options", [(), ("-e", "-u")], ids=["plain", "strict"])
@pytest.mark.parametrize("shell", SHELLS)
def test_a_bare_shell_gets_python_ros_and_the_package(shell, options, tmp_path):
    script = f"""
        source {ROOT}/env.sh
        python -c 'import rclpy; from pi05_ros import Policy; from pi05_ros.msg import ActionChunk; print(ActionChunk)'
        ros2 pkg prefix pi05_ros
        command -v make_checkpoint
        echo "$FASTRTPS_DEFAULT_PROFILES_FILE"
    """
    result = run(shell, script, tmp_path, *options)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    message, prefix, executable, profiles = result.stdout.splitlines()
    assert "ActionChunk" in message
    assert Path(prefix).is_relative_to(ROOT / "install")
    assert Path(executable).is_relative_to(ROOT / "install")
    assert Path(profiles).samefile(ROOT / "config/fastdds.xml")


@pytest.mark.needs_launch
@pytest.mark.parametrize("shell", SHELLS)
def test_sourcing_twice_changes_nothing_and_keeps_what_the_user_set(shell, tmp_path):
    script = f"""
        export FASTRTPS_DEFAULT_PROFILES_FILE=/mine.xml ROS_AUTOMATIC_DISCOVERY_RANGE=SUBNET
        source {ROOT}/env.sh && env | sort > first
        source {ROOT}/env.sh && env | sort > second
        diff first second && echo "$FASTRTPS_DEFAULT_PROFILES_FILE $ROS_AUTOMATIC_DISCOVERY_RANGE"
    """
    result = run(shell, script, tmp_path)
    assert result.stdout == "/mine.xml SUBNET\n", result.stderr


@pytest.mark.needs_launch
def test_every_executable_has_help(tmp_path):
    listed = run("bash", f"source {ROOT}/env.sh && ros2 pkg executables pi05_ros", tmp_path).stdout
    names = re.findall(r"^pi05_ros (\w+)$", listed, re.MULTILINE)
    assert {"policy_node", "make_checkpoint", "aloha_sim"} <= set(names)
    for name in names:
        result = run("bash", f"source {ROOT}/env.sh && ros2 run pi05_ros {name} --help", tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("usage:"), name


@pytest.mark.parametrize("shell", SHELLS)
def test_without_set_up_it_says_what_to_run(shell, tmp_path):
    shutil.copy(ROOT / "env.sh", tmp_path)
    result = run(shell, "source ./env.sh; echo status $?", tmp_path)
    assert result.stdout == "status 1\n"
    assert f"run `make setup` in {tmp_path} first" in result.stderr


def test_called_instead_of_sourced_it_says_so(tmp_path):
    result = run("bash", f"bash {ROOT}/env.sh", tmp_path)
    assert result.returncode == 1
    assert "source ./env.sh" in result.stderr
