"""One version, one list of executables: package.xml, setup.py and CMakeLists.txt say the same."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pi05_ros

ROOT = Path(__file__).parents[2]


def setup_py(*arguments: str) -> str:
    command = [sys.executable, "setup.py", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def executables_of_setup_py() -> list[str]:
    (listed,) = re.findall(r"^EXECUTABLES = \[(.*?)\]", (ROOT / "setup.py").read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r'"(\w+)"', listed)


def test_package_xml_setup_py_and_the_package_have_one_version():
    package_xml = ElementTree.parse(ROOT / "package.xml").getroot()
    assert package_xml.findtext("version") == pi05_ros.__version__
    assert setup_py("--version") == pi05_ros.__version__
    assert f"\n{pi05_ros.__version__} " in (ROOT / "CHANGELOG.rst").read_text()


def test_package_xml_and_setup_py_have_one_name_and_licence():
    package_xml = ElementTree.parse(ROOT / "package.xml").getroot()
    assert [package_xml.findtext("name"), package_xml.findtext("license")] == setup_py("--name", "--license").split()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_cmake_and_setup_py_install_the_same_executables():
    (listed,) = re.findall(r"set\(EXECUTABLES ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert sorted(listed.split()) == sorted(executables_of_setup_py())


def test_each_executable_is_a_tool_with_a_main_function():
    for name in executables_of_setup_py():
        specification = importlib.util.find_spec(f"pi05_ros.tools.{name}")
        assert specification is not None, name
        assert specification.origin is not None
        assert "\ndef main(" in Path(specification.origin).read_text(), name


def test_every_folder_of_tests_is_a_package():
    """Tests mirror the package, in which several rooms have a node.py: without this, pytest refuses the second."""
    folders = {path.parent for path in (ROOT / "test").glob("*/test_*.py")}
    assert {folder.name for folder in folders if not (folder / "__init__.py").is_file()} == set()
