"""Imports point one way, and each room imports only what it may. Read from the sources, so that it holds anywhere."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "pi05_ros"

# A room may import those before it; rooms on one line do not know each other.
ORDER = (
    ("model",),
    ("checkpoint",),
    ("engine",),
    ("policy",),
    ("robot",),
    ("server",),
    ("ros", "evaluation", "sim", "client"),
    ("tools",),
)
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
PURE_ROOMS = [room for rooms in ORDER[:5] for room in rooms]

EVERYWHERE = {"pi05_ros", "pi05_ros.__version__", "pi05_ros.errors"}  # not what the package re-exports from rooms
PURE_LIBRARIES = {"torch", "numpy", "safetensors", "PIL", "yaml", "tokenizers", "sentencepiece"}
TRITON_AT = PACKAGE / "engine/kernels/language.py"  # guarded there: Triton may be absent
WHERE_AN_ENCODING_NEEDS_IT = {"cv2", "cv_bridge"}  # only inside functions, and only in the robot room
ROS_LIBRARIES = {"rclpy", "rcl_interfaces", "builtin_interfaces", "launch", "launch_ros", "ament_index_python"}
MAY_USE_ROS = {"ros", "sim", "tools"}


class Import(NamedTuple):
    module: Path
    line: int
    name: str  # dotted, absolute
    at_start: bool  # False: inside a function

    @property
    def room(self) -> str:
        return self.module.relative_to(PACKAGE).parts[0]

    @property
    def library(self) -> str:
        return self.name.split(".")[0]

    @property
    def target_room(self) -> str | None:
        parts = self.name.split(".")
        return parts[1] if parts[0] == "pi05_ros" and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"{self.module.relative_to(PACKAGE.parent)}:{self.line} imports {self.name}"


def imports_of(module: Path) -> Iterator[Import]:
    def visit(node: ast.AST, at_start: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, node.lineno, alias.name, at_start)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.relative_to(PACKAGE.parent).with_suffix("").parts[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            for alias in node.names if base == "pi05_ros" else node.names[:1]:
                yield Import(module, node.lineno, f"{base}.{alias.name}" if base == "pi05_ros" else base, at_start)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_start and not inside)

    yield from visit(ast.parse(module.read_text(encoding="utf-8")), True)


def is_ros(library: str) -> bool:
    return library in ROS_LIBRARIES or library.endswith(("_msgs", "_srvs"))


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)
IMPORTS = [found for module in MODULES for found in imports_of(module)]


def test_every_folder_of_the_package_is_a_room():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms <= set(RANK)
    assert set(PURE_ROOMS) <= rooms


def test_rooms_import_only_rooms_before_them():
    wrong = []
    for found in IMPORTS:
        if found.library != "pi05_ros" or found.name in EVERYWHERE or found.target_room == "msg":
            continue
        if found.target_room not in RANK:
            wrong.append(f"{found} through the package; import it from the room that defines it")
        elif found.target_room != found.room and RANK[found.target_room] >= RANK[found.room]:
            wrong.append(str(found))
    assert wrong == []


def test_only_the_ros_rooms_import_ros():
    wrong = [
        str(found)
        for found in IMPORTS
        if (is_ros(found.library) or found.target_room == "msg") and found.room not in MAY_USE_ROS
    ]
    assert wrong == []


def test_pure_rooms_import_few_libraries():
    wrong = []
    for found in IMPORTS:
        if found.room not in PURE_ROOMS or found.library in sys.stdlib_module_names | {"pi05_ros"} | PURE_LIBRARIES:
            continue
        if found.library in WHERE_AN_ENCODING_NEEDS_IT and found.room == "robot" and not found.at_start:
            continue
        if found.library == "triton" and found.module == TRITON_AT:
            continue
        wrong.append(str(found))
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "name", "at_start"),
    [
        ("from pi05_ros.ros.node import Node", "pi05_ros.ros.node", True),
        ("from pi05_ros import policy", "pi05_ros.policy", True),
        ("from . import weights", "pi05_ros.checkpoint", True),
        ("from ..ros import node", "pi05_ros.ros", True),
        ("def f():\n    import cv2", "cv2", False),
        ("if True:\n    import rclpy.node", "rclpy.node", True),
    ],
)
def test_the_reader_of_imports_sees_each_form(tmp_path, monkeypatch, source, name, at_start):
    module = tmp_path / "pi05_ros" / "checkpoint" / "example.py"
    module.parent.mkdir(parents=True)
    module.write_text(source)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "pi05_ros")
    assert [(found.name, found.at_start) for found in imports_of(module)] == [(name, at_start)]
