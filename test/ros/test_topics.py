"""Why a topic is silent: sentences that a lab can act on, from names, types and policies alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.ros.topics import COMPRESSED, IMAGE, SUGGESTIONS, Publisher, Subscription, closest, why_silent

JOINTS = "sensor_msgs/msg/JointState"
TOPIC = "/cam_left_wrist/camera/color/image_rect_raw"
WANTED = Subscription(TOPIC, IMAGE)


@pytest.mark.parametrize(
    "other",
    [
        "/cam_left_wrist/color/image_rect_raw",  # realsense-ros up to 4.54
        "/cam_left_wrist/cam_left_wrist/color/image_rect_raw",  # camera_name set to the namespace's name
        "/cam_left_wrist/camera/color/image_raw",  # not a D405
        "/camera/cam_left_wrist/color/image_raw",  # the default namespace
        "/cam_left_wrist/image_color",
    ],
)
def test_the_same_camera_spelled_another_way_comes_first(other: str) -> None:
    others = [
        "/cam_right_wrist/camera/color/image_rect_raw",  # more letters in common, and the wrong arm
        "/cam_left_wrist/camera/depth/image_rect_raw",
        "/cam_high/camera/color/image_rect_raw",
        "/rviz/image",
    ]
    assert closest(TOPIC, [*others, other])[0] == other


@given(st.text(), st.lists(st.text(), unique=True))
def test_of_any_names_there_are_at_most_three_and_one_that_is_equal_is_first(topic: str, others: list[str]) -> None:
    found = closest(topic, others)
    assert len(found) == min(len(others), SUGGESTIONS)
    assert set(found) <= set(others)
    assert closest(topic, [*(other for other in others if other != topic), topic])[0] == topic


def test_a_topic_that_nobody_publishes_is_told_with_the_nearest_of_its_type() -> None:
    topics = {
        "/cam_left_wrist/color/image_rect_raw": [IMAGE],
        "/follower_left/joint_states": [JOINTS],
        "/cam_left_wrist/camera/color/image_rect_raw/compressed": [COMPRESSED],
    }
    assert why_silent(WANTED, [], topics) == (
        f"Nobody publishes {TOPIC}; {IMAGE} comes on /cam_left_wrist/color/image_rect_raw: mend the robot profile, or "
        "remap the topic."
    )


def test_a_camera_that_comes_in_the_other_transport_alone() -> None:
    reason = why_silent(WANTED, [], {f"{TOPIC}/compressed": [COMPRESSED]})
    assert reason is not None
    assert f"{COMPRESSED} comes on {TOPIC}/compressed" in reason
    assert "set its transport to compressed" in reason
    reason = why_silent(Subscription("/joints", JOINTS), [], {f"{TOPIC}/compressed": [COMPRESSED]})
    assert (
        reason
        == f"Nobody publishes /joints, nor {JOINTS} at all: is the driver running, and in this node's ROS_DOMAIN_ID?"
    )


def test_another_type_on_the_topic() -> None:
    assert why_silent(WANTED, [Publisher("/camera", COMPRESSED)], {}) == (
        f"{TOPIC}: /camera publishes {COMPRESSED} there, this node reads {IMAGE}: set the camera's transport to "
        "compressed in the robot profile."
    )
    reason = why_silent(Subscription("/joints", JOINTS), [Publisher("/camera", IMAGE)], {})
    assert reason is not None
    assert reason.endswith("mend the topic in the robot profile.")


POLICIES = {"reliability": ("best_effort", "reliable"), "durability": ("volatile", "transient_local")}


@given(
    *(st.sampled_from(POLICIES[policy]) for policy in ("reliability", "durability")),
    st.lists(st.tuples(*(st.sampled_from(POLICIES[policy]) for policy in ("reliability", "durability"))), min_size=1),
)
def test_a_publisher_reaches_a_subscription_that_asks_for_no_more_than_it_offers(
    reliability: str, durability: str, offers: list[tuple[str, str]]
) -> None:
    wanted = Subscription(TOPIC, IMAGE, reliability, durability)
    publishers = [Publisher(f"/camera_{index}", IMAGE, *offer) for index, offer in enumerate(offers)]

    def enough(offer: tuple[str, str]) -> bool:
        rank = {"best_effort": 0, "reliable": 1, "volatile": 0, "transient_local": 1}
        return rank[offer[0]] >= rank[reliability] and rank[offer[1]] >= rank[durability]

    reason = why_silent(wanted, publishers, {})
    assert (reason is None) == any(map(enough, offers))
    if reason is not None:
        assert f"set qos_overrides.{TOPIC}.subscription." in reason


def test_a_conflict_says_who_offers_what_and_the_parameter_that_mends_it() -> None:
    wanted = Subscription(TOPIC, IMAGE, "reliable", "transient_local")
    publishers = [Publisher("/high/camera", IMAGE, "best_effort", "volatile"), Publisher("/b", IMAGE)]
    assert why_silent(wanted, publishers, {}) == (
        f"{TOPIC}: /high/camera offers best_effort and volatile, /b offers volatile, this node asks for reliable and "
        f"transient_local, so nothing arrives: set qos_overrides.{TOPIC}.subscription.reliability to best_effort and "
        f"qos_overrides.{TOPIC}.subscription.durability to volatile."
    )
