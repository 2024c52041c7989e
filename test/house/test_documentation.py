"""What the documentation states of names and files is true of the code."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_parameter_table_is_what_the_declarations_make() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts/parameter_table.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    page = (ROOT / "docs/reference/ros-interface.md").read_text()
    assert f"\n\n{made}\n" in page, "run: python scripts/parameter_table.py --write"


PROFILE_PAGE = ROOT / "docs/reference/robot-profiles.md"


@pytest.mark.parametrize("kind", ["RobotProfile", "Camera", "Arm", "Gripper", "Command", "Limits", "OpenpiConventions"])
def test_every_profile_field_is_documented_with_its_default(kind: str) -> None:
    from pi05_ros.policy import profile

    section = PROFILE_PAGE.read_text().partition(f"\n### {kind}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\| \S.* \|$", section, re.MULTILINE)
    documented = {name: yaml.safe_load(default) for name, default in rows}
    fields = dataclasses.fields(getattr(profile, kind))
    assert set(documented) == {field.name for field in fields}
    for field in fields:
        no_default = field.default is dataclasses.MISSING or dataclasses.is_dataclass(field.default)
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        assert documented[field.name] == (None if no_default else default), field.name


def test_the_generations_of_grippers_are_documented() -> None:
    from pi05_ros.policy.gripper import GENERATIONS

    for name, numbers in GENERATIONS.items():
        state, command = (f"{numbers[f'{what}_at_0']:g}, {numbers[f'{what}_at_1']:g}" for what in ("state", "command"))
        assert f"| `{name}` | {state} | {command} |" in PROFILE_PAGE.read_text()


def test_the_profile_to_begin_with_is_valid(tmp_path: Path) -> None:
    from pi05_ros.policy import load_profile, make_example

    block = re.search(r"```yaml\n( +name: my_arm\n.*?)```", PROFILE_PAGE.read_text(), re.DOTALL)
    assert block
    (tmp_path / "my_arm.yaml").write_text(textwrap.dedent(block[1]))
    profile = load_profile(tmp_path / "my_arm.yaml")
    assert make_example(profile).state.shape == (profile.state_dim,) == (7,)


def test_every_profile_is_documented() -> None:
    from pi05_ros.policy.profile import profile_names

    text = (ROOT / "docs/reference/robot-profiles.md").read_text()
    for name in profile_names():
        assert f"`{name}`" in text


def test_every_python_dependency_has_its_reason() -> None:
    text = (ROOT / "docs/reference/dependencies.md").read_text().lower()
    wanted = re.findall(r'^        "([\w-]+)[><=]', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert len(wanted) >= 8
    for name in wanted:
        assert name.lower().removesuffix("-headless") in text, name
