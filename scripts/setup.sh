#!/usr/bin/env bash
# Prepares the environment of pi05_ros in .venv and builds the package. Run it as often as you like: what is done and
# unchanged is not done again. `scripts/setup.sh --help` tells what can be set.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SCRIPTS=$ROOT/scripts
VENV=$ROOT/.venv
EXTRA=$VENV/ros2_extra                # pure-Python ROS packages for which there is no wheel of their own
STAMPS=$VENV/.stamps
LOG=$VENV/setup.log
ISAACSIM=isaacsim-ros2==6.2.0.0
STEPS=6
STEP=0

usage() {
    cat <<'TEXT'
Usage: scripts/setup.sh [--no-build | --help]

Makes .venv (Python, ROS 2, torch, test tools) and builds the package into build/ and install/. A ROS 2 that is
sourced is used; otherwise ROS 2 Jazzy comes as wheels from PyPI. Afterwards: source ./env.sh

  --no-build                    only the environment

Environment variables:
  PYTHON                        interpreter to use (default: the one of the sourced ROS; else python3.11, 3.12)
  PI05_ROS_TORCH                pip requirement for torch (default: torch==2.13.0 on Python 3.11, else torch>=2.4).
                                PyPI's build for Linux carries CUDA (several GB); a path or URL of a CPU wheel saves that
  PI05_ROS_WHEELS=1             use the wheels although a ROS 2 is sourced
  PI05_ROS_ACCEPT_ISAACSIM=0    do not fetch the isaacsim-ros2 wheel (proprietary licence as a whole), from which
                                ROS 2's own launch and command-line packages (Apache-2.0, BSD) are unpacked; then
                                `ros2 ...`, launch files and the tests that launch nodes do not work
TEXT
}

say() { printf '%s\n' "$*"; }

fail() {
    printf '\nsetup: %s\n' "$*" >&2
    exit 1
}

# --- steps, stamps and progress --------------------------------------------------------------------------------------

digest() { sha256sum | cut -c1-16; }

# step NAME KEY FUNCTION TITLE: runs the function unless it succeeded before with the same key.
step() {
    local name=$1 key=$2 function=$3 title=$4 started=$SECONDS
    STEP=$((STEP + 1))
    if [ -f "$STAMPS/$name" ] && [ "$(cat "$STAMPS/$name")" = "$key" ]; then
        say "[$STEP/$STEPS] $title: up to date"
        return
    fi
    rm -f "$STAMPS/$name"
    say "[$STEP/$STEPS] $title ..."
    "$function"
    mkdir -p "$STAMPS"
    printf '%s\n' "$key" > "$STAMPS/$name"
    say "[$STEP/$STEPS] $title: done in $((SECONDS - started)) s"
}

# logged WHAT COMMAND...: output goes to the log; a sign of life every 15 s; on failure the end of the log and a reason.
logged() {
    local what=$1 started=$SECONDS pid status=0
    shift
    printf '\n==== %s: %s\n' "$what" "$*" >> "$LOG"
    local before
    before=$(wc -l < "$LOG")
    "$@" < /dev/null >> "$LOG" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2> /dev/null || true; exit 130' INT TERM
    while kill -0 "$pid" 2> /dev/null; do
        if [ $(((SECONDS - started) % 15)) -eq 14 ]; then
            say "        $((SECONDS - started + 1)) s: $(tail -n 1 "$LOG" | tr '\r' '\n' | tail -n 1 | cut -c1-100)"
        fi
        sleep 1
    done
    wait "$pid" || status=$?
    trap - INT TERM
    [ "$status" -eq 0 ] && return
    tail -n +"$((before + 1))" "$LOG" | tail -n 15 | sed 's/^/        | /' >&2
    fail "step $STEP of $STEPS failed: $what (exit code $status). The whole log is $LOG. Run the same command again" \
        "to continue from this step."
}

pip_install() { logged "$1" "$VENV/bin/python" -m pip install --no-input --progress-bar off "${@:2}"; }

# --- which Python, which ROS -----------------------------------------------------------------------------------------

works() { "$1" -c "import sys; sys.exit(not ${2:-True})" > /dev/null 2>&1; }

# A ROS 2 of the machine's own is sourced, and it is not what .venv/setup.bash gave to this shell.
ros_is_sourced() {
    [ "${PI05_ROS_WHEELS:-0}" != 1 ] && [ -n "${AMENT_PREFIX_PATH:-}" ] && [ -n "${ROS_DISTRO:-}" ] &&
        [[ ":$AMENT_PREFIX_PATH:" != *":$VENV:"* ]] && "${PYTHON:-python3}" -c 'import rclpy' > /dev/null 2>&1
}

choose() {
    if ros_is_sourced; then
        SOURCE=system
        BASE=$(command -v "${PYTHON:-python3}")
        say "Using ROS 2 $ROS_DISTRO, which is sourced, with $("$BASE" --version)."
        return
    fi
    SOURCE=wheels
    BASE=
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3 /usr/bin/python3.11 /usr/bin/python3.12}; do
        if works "$candidate" 'sys.version_info[:2] in ((3, 11), (3, 12))'; then
            BASE=$(command -v "$candidate")
            break
        fi
    done
    if [ -z "$BASE" ]; then
        fail "no usable Python: ${PYTHON:-python3.11 and python3.12} not found or of another version. Without a sourced" \
            "ROS 2, Python 3.11 or 3.12 is needed (Debian 12: apt install python3; Ubuntu 24.04 the same), or name one" \
            "with PYTHON=/path/to/python3.11."
    fi
    say "Using ROS 2 Jazzy wheels with $("$BASE" --version) ($BASE)."
}

# --- steps -----------------------------------------------------------------------------------------------------------

has_library() { PATH=$PATH:/sbin:/usr/sbin ldconfig -p | grep -q "$1"; }

missing_packages() {
    local version
    version=$("$BASE" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    command -v cmake > /dev/null || echo cmake
    command -v g++ > /dev/null || echo g++
    command -v make > /dev/null || echo make
    "$BASE" -c 'import ensurepip, venv' 2> /dev/null || echo "$version-venv"
    "$BASE" -c 'import os, sysconfig as s; open(os.path.join(s.get_path("include"), "Python.h"))' 2> /dev/null ||
        echo "$version-dev"
    has_library libEGL_mesa || has_library libOSMesa || echo libegl1 libegl-mesa0 libgl1-mesa-dri
    has_library libGL.so.1 || has_library libOpenGL.so.0 || echo libgl1 libopengl0
}

system_packages() {
    local missing
    missing=$(missing_packages | tr '\n' ' ' | sed 's/ *$//')
    STEP=$((STEP + 1))
    if [ -z "$missing" ]; then
        say "[$STEP/$STEPS] System packages: all there"
        return
    fi
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
        fail "system packages are missing: $missing. Install them and run the same command again:" $'\n\n' \
            "   sudo apt-get update && sudo apt-get install -y --no-install-recommends $missing"
    fi
    say "[$STEP/$STEPS] System packages: installing $missing ..."
    logged "apt-get update" apt-get update
    # shellcheck disable=SC2086
    logged "apt-get install $missing" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends $missing
    missing=$(missing_packages | tr '\n' ' ')
    [ -z "${missing// /}" ] || fail "these are still missing after apt-get install: $missing"
}

make_venv() {
    if [ -e "$VENV" ] && [ ! -d "$STAMPS" ]; then
        fail "$VENV exists but was not made by this script; move it away and run the same command again."
    fi
    rm -rf "$VENV"
    mkdir -p "$STAMPS"
    local options=()
    [ "$SOURCE" = system ] && options=(--system-site-packages)
    logged "creating .venv" "$BASE" -m venv "${options[@]}" "$VENV"
    touch "$VENV/COLCON_IGNORE"
}

# The wheels' CMake files name the machine they were built on; without this, no message can be compiled.
correct_cmake_paths() {
    local include numpy
    include=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    numpy=$("$VENV/bin/python" -c 'import numpy; print(numpy.get_include())')
    grep -rlZ /opt/python/ "$VENV/share" --include='*.cmake' | xargs -0 -r sed -i -E \
        -e "s#/opt/python/cp[0-9]+-cp[0-9]+/lib/python3\.[0-9]+/site-packages/numpy/_core/include#$numpy#g" \
        -e "s#/opt/python/cp[0-9]+-cp[0-9]+/include/python3\.[0-9]+#$include#g"
}

# What /opt/ros/DISTRO/setup.bash is for an installed ROS. Plain exports: any POSIX shell can source it.
write_setup_file() {
    local libraries=$VENV/lib folder
    for folder in "$SITE"/ros_*.libs; do
        [ -d "$folder" ] && libraries=$libraries:$folder
    done
    cat > "$VENV/setup.bash" <<TEXT
export VIRTUAL_ENV='$VENV' PATH='$VENV/bin':"\$PATH" AMENT_PREFIX_PATH='$VENV' CMAKE_PREFIX_PATH='$VENV'
export LD_LIBRARY_PATH='$libraries'
export _ROS_WHEELS_BOOTSTRAP_COMPLETE=1 ROS_DISTRO=jazzy ROS_VERSION=2 ROS_PYTHON_VERSION=3
export RMW_IMPLEMENTATION=rmw_fastrtps_cpp ROS2CLI_NO_DAEMON=1
export ROS_AUTOMATIC_DISCOVERY_RANGE="\${ROS_AUTOMATIC_DISCOVERY_RANGE:-LOCALHOST}"
TEXT
}

ros_wheels() {
    pip_install "ROS 2 Jazzy wheels" -r "$SCRIPTS/requirements-ros.txt"
    correct_cmake_paths
    write_setup_file
}

announce_isaacsim() {
    say "        ROS 2's launch, launch_ros, launch_testing and ros2cli have no wheels of their own. They are taken out of"
    say "        $ISAACSIM (133 MB). That wheel as a whole is under a proprietary licence (NVIDIA); only the"
    say "        packages of ROS 2 in it (Apache-2.0 and BSD) are unpacked, into .venv; the rest is deleted, and nothing"
    say "        of it becomes part of this project. Set PI05_ROS_ACCEPT_ISAACSIM=0 to decline."
}

launch_packages() {
    rm -rf "$EXTRA"
    mkdir -p "$EXTRA"
    if [ "${PI05_ROS_ACCEPT_ISAACSIM:-1}" = 0 ]; then
        say "        Declined (PI05_ROS_ACCEPT_ISAACSIM=0): \`ros2 ...\`, launch files and the tests that launch nodes will"
        say "        not work. The policy node itself, the Python API and all other tests do."
        rm -f "$SITE/ros2_extra.pth" "$VENV/bin/ros2" "$VENV/bin/launch_test"
        return
    fi
    announce_isaacsim
    local folder
    folder=$(mktemp -d)
    # The wheel is tagged for Python 3.12, but what is taken from it is pure Python.
    logged "download of $ISAACSIM" "$VENV/bin/python" -m pip download --no-input --progress-bar off --no-deps \
        --only-binary=:all: --implementation cp --python-version 312 --abi none \
        --platform "manylinux_2_35_$(uname -m)" -d "$folder" "$ISAACSIM"
    logged "unpacking ROS 2 packages" "$VENV/bin/python" "$SCRIPTS/unpack_launch.py" "$folder"/isaacsim_ros2-*.whl "$EXTRA"
    rm -rf "$folder"
    # pip is not involved, so a .pth makes the folder importable, and its egg-info folders visible to entry points.
    echo "$EXTRA" > "$SITE/ros2_extra.pth"
    write_command ros2 ros2cli.cli
    write_command launch_test launch_testing.launch_test
    logged "compiling composition_interfaces" compile_composition_interfaces
}

write_command() {
    printf '#!%s\nimport sys\n\nfrom %s import main\n\nsys.exit(main())\n' "$VENV/bin/python" "$2" > "$VENV/bin/$1"
    chmod +x "$VENV/bin/$1"
}

compile_composition_interfaces() (
    set -e
    source "$VENV/setup.bash"
    sources=$EXTRA/src/composition_interfaces
    cat > "$sources/CMakeLists.txt" <<'TEXT'
cmake_minimum_required(VERSION 3.8)
project(composition_interfaces)
find_package(ament_cmake REQUIRED)
find_package(rosidl_default_generators REQUIRED)
find_package(rcl_interfaces REQUIRED)
rosidl_generate_interfaces(${PROJECT_NAME} srv/LoadNode.srv srv/UnloadNode.srv srv/ListNodes.srv DEPENDENCIES rcl_interfaces)
ament_package()
TEXT
    build=$(mktemp -d)
    cmake -S "$sources" -B "$build" -DCMAKE_INSTALL_PREFIX="$VENV" -DPython3_EXECUTABLE="$VENV/bin/python" -DBUILD_TESTING=OFF
    cmake --build "$build" -j2
    cmake --install "$build"
    rm -rf "$build"
)

python_packages() {
    local constraints=()
    [ "$SOURCE" = system ] && constraints=(-c "$SCRIPTS/constraints-system.txt")
    pip_install "Python packages and $TORCH" "${constraints[@]}" -r "$SCRIPTS/requirements.txt" "$TORCH"
    pip_install "scene files of gym-aloha" --no-deps -r "$SCRIPTS/requirements-nodeps.txt"
}

# --- main ------------------------------------------------------------------------------------------------------------

main() {
    local build=1
    case "${1:-}" in
        --help | -h) usage; exit ;;
        --no-build) build=0 ;;
        '') ;;
        *) usage >&2; exit 2 ;;
    esac
    choose
    system_packages
    local base_key
    base_key="$SOURCE $("$BASE" -c 'import sys; print(sys.version_info[:3], sys.base_prefix)') $VENV ${ROS_DISTRO:-}"
    step venv "$base_key" make_venv "Python environment .venv"
    SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    local version
    version=$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    TORCH=${PI05_ROS_TORCH:-$([ "$version" = 3.11 ] && echo torch==2.13.0 || echo 'torch>=2.4')}
    export _ROS_WHEELS_BOOTSTRAP_COMPLETE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
    if [ "$SOURCE" = wheels ]; then
        step ros "$(digest < "$SCRIPTS/requirements-ros.txt")" ros_wheels "ROS 2 Jazzy wheels"
        step launch "$ISAACSIM ${PI05_ROS_ACCEPT_ISAACSIM:-1}" launch_packages "launch and ros2 command"
    fi
    step python "$(cat "$SCRIPTS"/requirements.txt "$SCRIPTS"/requirements-nodeps.txt - <<< "$TORCH" | digest)" \
        python_packages "Python packages"
}

main "$@"
