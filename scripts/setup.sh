#!/usr/bin/env bash
# Prepares the environment of pi05_ros in .venv and builds the package. Run it as often as you like: what is done and
# unchanged is not done again. `scripts/setup.sh --help` tells what can be set.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SCRIPTS=$ROOT/scripts
VENV=$ROOT/.venv
EXTRA=$VENV/ros2_extra                # pure-Python ROS packages for which there is no wheel of their own
STAMPS=$VENV/.stamps
LOG=$VENV/setup.log                   # of a temporary name until there is a .venv
ISAACSIM=isaacsim-ros2==6.2.0.0
STEP=0

usage() {
    cat <<'TEXT'
Usage: scripts/setup.sh [--no-build | --help]

Makes .venv (Python, ROS 2, torch, test tools) and builds the package into build/ and install/. A ROS 2 that is
sourced is used; otherwise ROS 2 Jazzy comes as wheels from PyPI. Afterwards: source ./env.sh

  --no-build                    only the environment

Environment variables:
  PYTHON                        interpreter to use (default: python3 of the sourced ROS; else the first there is of
                                python3.11, 3.12, 3.10, 3.13)
  PI05_ROS_TORCH                pip requirement for torch (default: torch==2.13.0 on Python 3.11, else torch>=2.4).
                                PyPI's build for Linux carries CUDA (several GB); the path of a CPU wheel saves that
  PI05_ROS_ACCEPT_ISAACSIM=0    do not fetch the isaacsim-ros2 wheel (proprietary licence as a whole), from which
                                ROS 2's own launch and command-line packages (Apache-2.0, BSD) are unpacked; then
                                `ros2 ...`, launch files and the tests that launch nodes do not work
TEXT
}

source "$SCRIPTS/progress.sh"

pip_install() { logged "$1" "$VENV/bin/python" -m pip install --no-input --progress-bar off "${@:2}"; }

# The pip of Python 3.10 searches for hours among the versions of what we need.
present_pip() { pip_install "a present pip" "pip>=25"; }

# --- which Python, which ROS -----------------------------------------------------------------------------------------

# The interpreter behind a name: not a version manager's shim, nor a virtual environment made from it.
interpreter() { "$1" -c 'import os, sys; print(os.path.realpath(sys.executable))' 2> /dev/null; }

succeeds() { "$1" -c "$2" > /dev/null 2>&1; }

# A ROS 2 of the machine's own, rather than the one that env.sh gave to this shell.
ros_is_sourced() { [ -n "${AMENT_PREFIX_PATH:-}" ] && [[ ":$AMENT_PREFIX_PATH:" != *":$VENV:"* ]]; }

# Where .venv was made beside an installed ROS, a shell in which that is not sourced goes on with it.
recall_ros() {
    if [ -z "${AMENT_PREFIX_PATH:-}" ] && grep -qs '^system' "$STAMPS/venv" && [ -f "$ROOT/install/setup.bash" ]; then
        set +u                        # colcon's files use variables that may be unset
        source "$ROOT/install/setup.bash"
        set -u
    fi
}

choose() {
    local candidate
    if ros_is_sourced; then
        SOURCE=system
        if ! BASE=$(interpreter "${PYTHON:-python3}") || ! succeeds "$BASE" 'import rclpy'; then
            fail "a ROS 2 is sourced (AMENT_PREFIX_PATH=$AMENT_PREFIX_PATH), but ${PYTHON:-python3} cannot import its" \
                "rclpy. Name the Python of that ROS (PYTHON=/usr/bin/python3), or use a shell in which none is sourced."
        fi
        say "Using ROS 2 ${ROS_DISTRO:-}, which is sourced, with $("$BASE" --version) ($BASE)."
        return
    fi
    SOURCE=wheels
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3.13 python3 /usr/bin/python3}; do
        BASE=$(interpreter "$candidate") || continue
        if succeeds "$BASE" 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
            say "Using ROS 2 Jazzy wheels with $("$BASE" --version) ($BASE)."
            return
        fi
    done
    BASE=
    [ -n "${PYTHON:-}" ] || command -v python3 > /dev/null || return 0   # none at all: one of the system packages
    fail "Python 3.10 to 3.13 is needed, as no ROS 2 is sourced and its wheels exist for these; looked at" \
        "${PYTHON:-python3.11, python3.12, python3.10, python3.13 and python3}. On Debian or Ubuntu: apt-get install" \
        "python3. Elsewhere source a ROS 2, or name an interpreter: PYTHON=/path/to/python3.11."
}

# --- system packages -------------------------------------------------------------------------------------------------

has_library() { PATH=$PATH:/sbin:/usr/sbin ldconfig -p | grep -q "$1"; }

missing_packages() {
    local python=python3 command
    if [ -z "$BASE" ]; then
        echo python3
    else
        python=$("$BASE" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    fi
    succeeds "$BASE" 'import ensurepip, venv' || echo "$python-venv"
    succeeds "$BASE" 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' ||
        echo "$python-dev"
    for command in cmake g++ make; do
        command -v "$command" > /dev/null || echo "$command"
    done
    # MuJoCo renders without a display through either of them.
    has_library libEGL_mesa || has_library libOSMesa || echo "libegl1 libegl-mesa0 libgl1-mesa-dri"
    has_library 'libGL\.so\.1' || echo libgl1
    [ "$SOURCE" = wheels ] || command -v colcon > /dev/null || echo python3-colcon-common-extensions
    has_browser || fetches_browser || echo chromium
}

# The tests of the status page need a Chromium.
has_browser() { command -v chromium > /dev/null || command -v google-chrome > /dev/null; }

# Ubuntu's package chromium only asks for a snap, which does not work in containers: there playwright fetches one.
fetches_browser() { grep -qsx 'ID=ubuntu' /etc/os-release; }

system_packages() {
    local missing
    missing=$(missing_packages | paste -sd ' ')
    STEP=$((STEP + 1))
    if [ -z "$missing" ]; then
        say "[$STEP/$STEPS] System packages: up to date"
        return
    fi
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
        fail "system packages are missing: $missing. Install them and run the same command again:" $'\n\n   ' \
            "sudo apt-get update && sudo apt-get install -y --no-install-recommends $missing"
    fi
    say "[$STEP/$STEPS] System packages: installing $missing ..."
    logged "apt-get update" apt-get update
    # shellcheck disable=SC2086
    logged "apt-get install $missing" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends $missing
    [ -n "$BASE" ] || choose
    missing=$(missing_packages | paste -sd ' ')
    [ -z "$missing" ] || fail "still missing after apt-get install: $missing."
}

# --- Python environment ----------------------------------------------------------------------------------------------

make_venv() {
    if [ -e "$VENV" ] && [ ! -d "$STAMPS" ]; then
        fail "$VENV exists but was not made by this script; move it away and run the same command again."
    fi
    rm -rf "$VENV" "$ROOT/build" "$ROOT/install"    # what was built against another Python or ROS is of no use
    mkdir -p "$STAMPS"
    if [ "$SOURCE" = system ]; then
        logged "creating .venv" "$BASE" -m venv --system-site-packages "$VENV"
        write_setup_file "export VIRTUAL_ENV='$VENV'"
    else
        logged "creating .venv" "$BASE" -m venv "$VENV"
    fi
}

# write_setup_file LINE...: what env.sh sources. Plain exports, so that bash and zsh both can.
write_setup_file() {
    {
        printf '%s\n' "$@"
        printf 'case ":$PATH:" in *":%s:"*) ;; *) export PATH="%s:$PATH" ;; esac\n' "$VENV/bin" "$VENV/bin"
    } > "$VENV/setup.bash"
}

ros_wheels() {
    present_pip
    pip_install "ROS 2 Jazzy wheels" -r "$SCRIPTS/requirements-ros.txt"
    correct_cmake_paths
}

# The wheels' own start-up hook runs python once more to set LD_LIBRARY_PATH; the first variable keeps it away.
write_wheels_setup_file() {
    local libraries=$VENV/lib folder
    for folder in "$SITE"/ros_*.libs; do
        libraries=$libraries:$folder
    done
    write_setup_file \
        "export _ROS_WHEELS_BOOTSTRAP_COMPLETE=1 LD_LIBRARY_PATH='$libraries'" \
        "export VIRTUAL_ENV='$VENV' AMENT_PREFIX_PATH='$VENV' CMAKE_PREFIX_PATH='$VENV'" \
        "export ROS_DISTRO=jazzy ROS_VERSION=2 ROS_PYTHON_VERSION=3 RMW_IMPLEMENTATION=rmw_fastrtps_cpp"
}

# The wheels' CMake files name the machine they were built on; with that, no message can be compiled.
correct_cmake_paths() {
    local include numpy
    include=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    numpy=$("$VENV/bin/python" -c 'import numpy; print(numpy.get_include())')
    grep -rlZ /opt/python/ "$VENV/share" --include='*.cmake' | xargs -0 -r sed -i -E \
        -e "s#/opt/python/cp[0-9]+-cp[0-9]+/lib/python3\.[0-9]+/site-packages/numpy/_core/include#$numpy#g" \
        -e "s#/opt/python/cp[0-9]+-cp[0-9]+/include/python3\.[0-9]+#$include#g"
}

python_packages() {
    local constraints=()
    present_pip
    [ "$SOURCE" = wheels ] || constraints=(-c "$SCRIPTS/constraints-system.txt")
    say "        $TORCH and the rest; PI05_ROS_TORCH can name a smaller build of torch than PyPI's with CUDA"
    pip_install "Python packages with $TORCH" "${constraints[@]}" -r "$SCRIPTS/requirements.txt" "$TORCH"
    pip_install "scene files of gym-aloha" --no-deps -r "$SCRIPTS/requirements-nodeps.txt"
    has_browser || ! fetches_browser || playwright_browser
}

# As root with the libraries that it needs; anybody else is told by playwright if some are missing.
playwright_browser() {
    local with_libraries=()
    [ "$(id -u)" -ne 0 ] || with_libraries=(--with-deps)
    say "        Chromium, for the tests of the status page"
    logged "Chromium for the tests" "$VENV/bin/python" -m playwright install "${with_libraries[@]}" chromium
}

# --- launch and the ros2 command, on the wheels ----------------------------------------------------------------------

launch_packages() {
    rm -rf "$EXTRA" "$SITE/ros2_extra.pth" "$VENV/bin/ros2" "$VENV/bin/launch_test"
    if [ "${PI05_ROS_ACCEPT_ISAACSIM:-1}" = 0 ]; then
        say "        Declined (PI05_ROS_ACCEPT_ISAACSIM=0): \`ros2 ...\`, launch files and the tests that launch nodes do"
        say "        not work. The policy node itself, the Python API and all other tests do."
        return
    fi
    say "        ROS 2's launch, launch_ros, launch_testing and ros2cli have no wheels of their own. They are taken from"
    say "        $ISAACSIM (133 MB), which as a whole is under a proprietary licence of NVIDIA. Only the"
    say "        packages of ROS 2 in it (Apache-2.0, BSD) are unpacked, into .venv. The rest is deleted, and nothing of"
    say "        it becomes part of this project. PI05_ROS_ACCEPT_ISAACSIM=0 declines it."
    mkdir "$EXTRA"
    local folder
    folder=$(mktemp -d)
    # Tagged for Python 3.12, but what is taken from it is pure Python.
    logged "download of $ISAACSIM" "$VENV/bin/python" -m pip download --no-input --progress-bar off --no-deps \
        --only-binary=:all: --implementation cp --python-version 312 --abi none \
        --platform "manylinux_2_35_$(uname -m)" -d "$folder" "$ISAACSIM"
    logged "unpacking ROS 2's packages" \
        "$VENV/bin/python" "$SCRIPTS/unpack_launch.py" "$folder"/isaacsim_ros2-*.whl "$EXTRA"
    rm -rf "$folder"
    logged "compiling composition_interfaces" compile_composition_interfaces
    install_launch_verb
    write_command ros2 ros2cli.cli
    write_command launch_test launch_testing.launch_test
    # No pip is involved: this line makes the folder importable, and the entry points in it visible.
    echo "$EXTRA" > "$SITE/ros2_extra.pth"
}

compile_composition_interfaces() (
    source "$VENV/setup.bash"
    sources=$EXTRA/src/composition_interfaces
    build=$(mktemp -d)
    cat > "$sources/CMakeLists.txt" <<'TEXT'
cmake_minimum_required(VERSION 3.16)
project(composition_interfaces)
find_package(ament_cmake REQUIRED)
find_package(rosidl_default_generators REQUIRED)
find_package(rcl_interfaces REQUIRED)
rosidl_generate_interfaces(${PROJECT_NAME} srv/LoadNode.srv srv/UnloadNode.srv srv/ListNodes.srv
  DEPENDENCIES rcl_interfaces)
ament_package()
TEXT
    cmake -S "$sources" -B "$build" -DCMAKE_INSTALL_PREFIX="$VENV" -DPython3_EXECUTABLE="$VENV/bin/python" \
        -DBUILD_TESTING=OFF && cmake --build "$build" -j2 && cmake --install "$build" && rm -rf "$build"
)

install_launch_verb() {
    local info=$EXTRA/pi05_ros_launch_verb-1.0.egg-info
    cp "$SCRIPTS/ros2_launch.py" "$EXTRA/pi05_ros_launch_verb.py"
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: pi05-ros-launch-verb\nVersion: 1.0\n' > "$info/PKG-INFO"
    printf '[ros2cli.command]\nlaunch = pi05_ros_launch_verb:LaunchCommand\n' > "$info/entry_points.txt"
}

write_command() {
    printf '#!%s\nimport sys\n\nfrom %s import main\n\nsys.exit(main())\n' "$VENV/bin/python" "$2" > "$VENV/bin/$1"
    chmod +x "$VENV/bin/$1"
}

# --- build -----------------------------------------------------------------------------------------------------------

# Python, YAML and launch files are installed as links, so their contents may change without a build; a new file, or
# what is compiled, needs one.
build_key() {
    cd "$ROOT"
    {
        find pi05_ros config launch -type f ! -name '*.pyc' | LC_ALL=C sort
        cat CMakeLists.txt package.xml msg/* scripts/executable.in
    } | digest
}

build_package() { logged "colcon build" colcon_build; }

colcon_build() (
    cd "$ROOT"
    source "$VENV/setup.bash"
    colcon build --symlink-install --packages-select pi05_ros --event-handlers console_direct+ \
        --cmake-args "-DPython3_EXECUTABLE=$VENV/bin/python"
)

# --- main ------------------------------------------------------------------------------------------------------------

main() {
    local build=1 version
    case "${1:-}" in
        --help | -h) usage; exit ;;
        --no-build) build=0 ;;
        '') ;;
        *) usage >&2; exit 2 ;;
    esac
    exec 9< "${BASH_SOURCE[0]}"
    flock -n 9 || { say "Waiting for another set-up of this checkout ..." && flock 9; }

    recall_ros
    choose
    STEPS=$((build + ($([ "$SOURCE" = wheels ] && echo 5 || echo 3))))
    system_packages
    # The wheels' distribution is fixed, and a shell that sourced env.sh has ROS_DISTRO set by it.
    local distro=
    [ "$SOURCE" = wheels ] || distro=${ROS_DISTRO:-}
    step venv "$SOURCE $distro $VENV $("$BASE" -c 'import sys; print(sys.version, sys.base_prefix)' | tr '\n' ' ')" \
        make_venv "Python environment .venv"
    LOG=$VENV/setup.log
    SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    version=$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    TORCH=${PI05_ROS_TORCH:-$([ "$version" = 3.11 ] && echo torch==2.13.0 || echo 'torch>=2.4')}
    export _ROS_WHEELS_BOOTSTRAP_COMPLETE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
    if [ "$SOURCE" = wheels ]; then
        step ros "$(digest < "$SCRIPTS/requirements-ros.txt")" ros_wheels "ROS 2 Jazzy wheels"
        write_wheels_setup_file
        step launch "${PI05_ROS_ACCEPT_ISAACSIM:-1} $(cat "$SCRIPTS"/{unpack_launch,ros2_launch}.py | digest)" \
            launch_packages "launch and the ros2 command"
    fi
    step python "$TORCH $(cat "$SCRIPTS"/{requirements,requirements-nodeps,constraints-system}.txt | digest)" \
        python_packages "Python packages"
    [ "$build" = 1 ] || return 0
    [ -f "$ROOT/install/setup.bash" ] || rm -f "$STAMPS/build"
    step build "$(build_key)" build_package "Build of the package"
}

main "$@"
