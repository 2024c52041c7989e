"""What the documentation states of names and files is true of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_parameter_table_is_complete() -> None:
    from pi05_ros.ros.parameters import PARAMETERS

    text = (ROOT / "docs/reference/ros-interface.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", text.partition("## Parameters")[2], re.MULTILINE))
    assert rows == {spec.name: json.dumps(spec.default) for spec in PARAMETERS}


def test_every_profile_field_is_documented() -> None:
    from dataclasses import fields

    from pi05_ros.policy.profile import Arm, Camera, Command, Gripper, Limits, OpenpiConventions, RobotProfile

    text = (ROOT / "docs/reference/robot-profiles.md").read_text()
    for kind in (RobotProfile, Camera, Arm, Gripper, Command, Limits, OpenpiConventions):
        for field in fields(kind):
            assert f"`{field.name}`" in text, f"{kind.__name__}.{field.name}"


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
