"""Take the launch, launch_testing and ros2cli packages out of the isaacsim-ros2 wheel.

The wheel as a whole is proprietary; the folders named here are ROS 2's own, under Apache-2.0 or BSD licences. They
go into the environment that setup.sh makes and nowhere else.

Usage: unpack_launch.py WHEEL DESTINATION
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path, PurePosixPath

ROOT = PurePosixPath("isaacsim/exts/isaacsim.ros2.core/jazzy")
PYTHON_PACKAGES = {
    *("launch", "launch_ros", "launch_testing", "launch_testing_ros", "launch_xml", "launch_yaml", "osrf_pycommon"),
    *("ros2cli", "ros2node", "ros2param", "ros2pkg", "ros2run", "ros2service", "ros2topic"),
    *("diagnostic_updater", "message_filters", "rosidl_runtime_py", "launch_testing_ros_pytest_entrypoint.py"),
}
INTERFACES = "composition_interfaces"  # launch_ros imports it, and no wheel has it: setup.sh compiles it


def destination_of(member: str) -> PurePosixPath | None:
    """Where that member of the wheel goes below DESTINATION; None: it is not wanted."""
    try:
        path = PurePosixPath(member).relative_to(ROOT)
    except ValueError:
        return None
    first, *rest = path.parts or ("",)
    # "launch-3.4.11-py3.12.egg-info" belongs to "launch": the entry points of its plugins are in there.
    if first == "rclpy" and rest and rest[0].split("-")[0] in PYTHON_PACKAGES:
        return PurePosixPath(*rest)
    if first == "share" and rest[:1] == [INTERFACES] and path.suffix in (".srv", ".xml"):
        return PurePosixPath("src", *rest)
    return None


def main() -> int:
    wheel, destination = Path(sys.argv[1]), Path(sys.argv[2])
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            target = destination_of(member)
            if target is None or member.endswith("/"):
                continue
            path = destination / target
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            count += 1
    if not (destination / "launch_ros").is_dir() or not (destination / "src" / INTERFACES / "package.xml").is_file():
        sys.stderr.write(f"{wheel.name}: launch_ros or {INTERFACES} is not where it was in version 6.2.0.0.\n")
        return 1
    sys.stdout.write(f"{count} files from {wheel.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
