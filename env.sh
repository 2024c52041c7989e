# source ./env.sh (bash or zsh, from any folder) gives a shell the Python environment, ROS 2, the built package and its
# executables. `make setup` must have run once.

# Work in a function: `return` leaves it, not the user's shell, and its variables stay local.
_pi05_ros_env() {
    local root shell=sh nounset=0
    if [ -n "${BASH_VERSION:-}" ]; then
        shell=bash
        root=${BASH_SOURCE[0]}
    elif [ -n "${ZSH_VERSION:-}" ]; then
        shell=zsh
        root=$(eval 'printf %s "${funcsourcetrace[1]%:*}"')
    else
        echo "env.sh: this shell is neither bash nor zsh; start one of them and source env.sh there." >&2
        return 1
    fi
    root=$(cd "$(dirname "$root")" > /dev/null && pwd)
    if [ ! -f "$root/.venv/setup.bash" ] || [ ! -f "$root/install/setup.$shell" ]; then
        echo "env.sh: the environment is not there yet; run \`make setup\` in $root first." >&2
        return 1
    fi
    case $- in *u*) nounset=1 && set +u ;; esac   # the setup files of colcon use variables that may be unset
    . "$root/.venv/setup.bash"
    . "$root/install/setup.$shell"
    [ "$nounset" = 0 ] || set -u

    case ":$PATH:" in
        *":$root/install/pi05_ros/lib/pi05_ros:"*) ;;
        *) export PATH="$root/install/pi05_ros/lib/pi05_ros:$PATH" ;;
    esac
    # Raw images need larger shared memory segments than Fast DDS's default; version 2 reads the first name, 3 the second.
    export FASTRTPS_DEFAULT_PROFILES_FILE="${FASTRTPS_DEFAULT_PROFILES_FILE:-$root/config/fastdds.xml}"
    export FASTDDS_DEFAULT_PROFILES_FILE="${FASTDDS_DEFAULT_PROFILES_FILE:-$root/config/fastdds.xml}"
    # Nodes of other machines are seen only when that is asked for.
    export ROS_AUTOMATIC_DISCOVERY_RANGE="${ROS_AUTOMATIC_DISCOVERY_RANGE:-LOCALHOST}"
}

if [ -n "${BASH_VERSION:-}" ] && [ "${BASH_SOURCE[0]}" = "$0" ]; then
    echo "env.sh: it changes the shell that sources it, so call it as: source ./env.sh" >&2
    exit 1
fi
_pi05_ros_env
_pi05_ros_status=$?
unset -f _pi05_ros_env
return $_pi05_ros_status
