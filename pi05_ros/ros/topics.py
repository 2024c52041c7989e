"""Why nothing comes on a topic, as a sentence that says what to do. Names, types and policies are plain text here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

SUGGESTIONS = 3
IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
TRANSPORTS = {IMAGE: "raw", COMPRESSED: "compressed"}

_SPELLINGS = dict.fromkeys(("image_rect_raw", "image_rect", "image_color", "image"), "image_raw")
"""A camera driver's names for the same picture; realsense-ros says image_rect_raw of a D405, image_raw of others."""


@dataclass(frozen=True)
class Publisher:
    """node: its full name. type: of its messages. reliability, durability: as it offers them, "best_effort", ..."""

    node: str
    type: str
    reliability: str = "reliable"
    durability: str = "volatile"


@dataclass(frozen=True)
class Subscription:
    """topic: its resolved name. type, reliability, durability: as they are asked for."""

    topic: str
    type: str
    reliability: str = "best_effort"
    durability: str = "volatile"


def closest(topic: str, others: Iterable[str]) -> list[str]:
    """The others, up to SUGGESTIONS, those that are written most alike first.

    realsense-ros puts the node's name into the topic, /cam/camera/color/... or /cam/cam/color/..., or (up to 4.54) does
    not, /cam/color/...: names that differ in that alone are as good as equal.
    """

    def unlikeness(other: str) -> tuple[float, float, str]:
        return -_ratio(_essence(topic), _essence(other)), -_ratio(topic, other), other

    return sorted(others, key=unlikeness)[:SUGGESTIONS]


def why_silent(
    wanted: Subscription, publishers: Sequence[Publisher], topics: Mapping[str, Sequence[str]]
) -> str | None:
    """Why no publisher reaches a subscription; None: one does.

    publishers: those of the topic. topics: of all topics that somebody publishes, the types.
    """
    if not publishers:
        return _nobody(wanted, topics)
    typed = [publisher for publisher in publishers if publisher.type == wanted.type]
    if not typed:
        return _other_type(wanted, publishers)
    if any(not _policies_in_conflict(wanted, publisher) for publisher in typed):
        return None
    return qos_conflict(wanted, typed)


def qos_conflict(wanted: Subscription, publishers: Sequence[Publisher]) -> str | None:
    """What publishers offer less of than is asked for, and how to ask for less; None: nothing."""
    offers, conflicts = [], set()
    for publisher in publishers:
        policies = _policies_in_conflict(wanted, publisher)
        conflicts.update(policies)
        if policies:
            offers.append(f"{publisher.node} offers {' and '.join(_LEAST[policy] for policy in policies)}")
    if not conflicts:
        return None
    mended = [policy for policy in _LEAST if policy in conflicts]
    asked = " and ".join(getattr(wanted, policy) for policy in mended)
    fix = " and ".join(f"qos_overrides.{wanted.topic}.subscription.{policy} to {_LEAST[policy]}" for policy in mended)
    return f"{wanted.topic}: {', '.join(offers)}, this node asks for {asked}, so nothing arrives: set {fix}."


_LEAST = {"reliability": "best_effort", "durability": "volatile"}
"""By policy what a publisher may offer that does not satisfy a subscription which asks for the other."""


def _policies_in_conflict(wanted: Subscription, publisher: Publisher) -> list[str]:
    return [
        policy
        for policy, least in _LEAST.items()
        if getattr(publisher, policy) == least and getattr(wanted, policy) != least
    ]


def _nobody(wanted: Subscription, topics: Mapping[str, Sequence[str]]) -> str:
    what = f"Nobody publishes {wanted.topic}"
    alike = closest(wanted.topic, (topic for topic, types in topics.items() if wanted.type in types))
    if alike:
        return f"{what}; {wanted.type} comes on {', '.join(alike)}: mend the robot profile, or remap the topic."
    for kind in TRANSPORTS:
        alike = closest(wanted.topic, (topic for topic, types in topics.items() if kind in types))
        if wanted.type in TRANSPORTS and alike:
            return (
                f"{what}, nor {wanted.type} at all; {kind} comes on {', '.join(alike)}: mend the camera's topic and "
                f"set its transport to {TRANSPORTS[kind]} in the robot profile."
            )
    return f"{what}, nor {wanted.type} at all: is the driver running, and in this node's ROS_DOMAIN_ID?"


def _other_type(wanted: Subscription, publishers: Sequence[Publisher]) -> str:
    found = publishers[0]
    fix = "mend the topic in the robot profile"
    if wanted.type in TRANSPORTS and found.type in TRANSPORTS:
        fix = f"set the camera's transport to {TRANSPORTS[found.type]} in the robot profile"
    return f"{wanted.topic}: {found.node} publishes {found.type} there, this node reads {wanted.type}: {fix}."


def _essence(topic: str) -> str:
    parts = (part for part in topic.lower().split("/") if part not in ("", "camera"))
    return "/".join(dict.fromkeys(_SPELLINGS.get(part, part) for part in parts))


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()
