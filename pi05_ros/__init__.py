"""Pi0.5 on a robot: the policy, its engine, and the ROS 2 node around them.

Under colcon the generated ``pi05_ros.msg`` lies in another folder of the same name; ``extend_path`` joins the two,
so that ``from pi05_ros import Policy`` and ``from pi05_ros.msg import ActionChunk`` work side by side.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

__path__ = extend_path(__path__, __name__)
__version__ = "0.1.0"
__all__ = ["ActionChunk", "Observation", "Policy", "__version__"]

if TYPE_CHECKING:
    from pi05_ros.policy import ActionChunk, Observation, Policy


def __getattr__(name: str) -> Any:
    """Import the public names on first use: a message import should not cost the import of torch."""
    if name in ("ActionChunk", "Observation", "Policy"):
        from pi05_ros import policy

        return getattr(policy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
