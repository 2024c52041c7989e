"""pip install: everything but what needs ROS. Under colcon, CMakeLists.txt installs the package instead."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

# NAME on the command line runs main() of pi05_ros/tools/NAME.py. The same list stands in CMakeLists.txt.
EXECUTABLES = ["policy_node", "action_server", "make_checkpoint", "aloha_sim", "benchmark"]

VERSION = re.search(r'^__version__ = "(.+)"$', Path("pi05_ros/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
assert VERSION, "pi05_ros/__init__.py has no line __version__ = ..."

setup(
    name="pi05_ros",
    version=VERSION[1],
    description="Runs the Pi0.5 robot policy natively and safely, on ROS 2 or without it",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["pi05_ros", "pi05_ros.*"]), "pi05_ros.config"],
    # The YAML files lie at the top of the repository, where ROS users look for them, and go into the package.
    package_dir={"pi05_ros.config": "config"},
    package_data={
        "pi05_ros": ["py.typed"],
        "pi05_ros.server": ["page/*"],
        "pi05_ros.config": ["*.yaml", "*.xml", "robots/*.yaml"],
    },
    install_requires=[
        "torch>=2.4",
        "numpy>=1.21",
        "safetensors>=0.4",
        "tokenizers>=0.15",
        "sentencepiece>=0.2",
        "Pillow>=9.0",
        "PyYAML>=5.4",
        "opencv-python-headless>=4.5",
        "msgpack>=1.0",
        "uvicorn>=0.30",
        "httptools>=0.6",
        "websockets>=15",
        "starlette>=0.40",
        "pydantic>=2.6",
        "prometheus-client>=0.17",
        "urllib3>=2",
    ],
    extras_require={
        # Of gym-aloha only the MuJoCo scene is used; `pip install --no-deps gym-aloha` saves what else it asks for.
        "sim": ["mujoco>=3.0,<3.9", "gym-aloha>=0.1.1", "matplotlib>=3.5"],
        "test": [
            "pytest>=7,<9",
            "hypothesis>=6",
            "ruff",
            "mypy",
            "types-PyYAML",
            "rosbags",
            "schemathesis>=4",
            "playwright",
            "psutil",
        ],
    },
    entry_points={"console_scripts": [f"{name} = pi05_ros.tools.{name}:main" for name in EXECUTABLES]},
)
