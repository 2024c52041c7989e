"""Streams to observations: which sample is used, and a full sentence for every reason why none is."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.errors import ProfileError
from pi05_ros.policy import make_example, profile_names
from pi05_ros.policy.profile import RobotProfile, load_profile
from pi05_ros.robot.assembly import AssembledObservation, ObservationAssembler
from pi05_ros.robot.refusal import Refusal

MS = 1_000_000
NOW = 1_764_569_600_000 * MS
PROFILE = load_profile("aloha_ros2")  # stale after 0.5 s, skew up to 0.1 s
CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
LEFT, RIGHT = "/follower_left/joint_states", "/follower_right/joint_states"
NAMES = ["waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper", "left_finger"]
POSITIONS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 9.0, 0.0579]


def frame(value: int = 0) -> np.ndarray:
    return np.full((4, 6, 3), value, np.uint8)


def filled(profile: RobotProfile = PROFILE, stamp_ns: int = NOW, **notices: Any) -> ObservationAssembler:
    """An assembler with one sample of everything."""
    assembler = ObservationAssembler(profile, **notices)
    for index, camera in enumerate(assembler.cameras):
        assembler.add_image(camera.name, stamp_ns, frame(index))
    for topic in assembler.topics:
        assembler.add_joint_state(topic, stamp_ns, NAMES, POSITIONS)
    return assembler


def observation(assembler: ObservationAssembler, now_ns: int = NOW) -> AssembledObservation:
    result = assembler.assemble(now_ns)
    assert isinstance(result, AssembledObservation), result
    return result


def refusal(assembler: ObservationAssembler, now_ns: int = NOW) -> Refusal:
    result = assembler.assemble(now_ns)
    assert isinstance(result, Refusal), result
    return result


def optional_wrist() -> RobotProfile:
    """The right wrist camera is not required."""
    cameras = tuple(
        dataclasses.replace(camera, required=camera.name != "cam_right_wrist" and camera.required)
        for camera in PROFILE.cameras
    )
    return dataclasses.replace(PROFILE, cameras=cameras)


# --- what an observation is made of ---


def test_an_observation_has_every_camera_and_the_state_by_name() -> None:
    assembled = observation(filled())
    assert list(assembled.images) == list(CAMERAS)
    assert [int(image[0, 0, 0]) for image in assembled.images.values()] == [0, 1, 2]
    assert assembled.state.dtype == np.float32
    np.testing.assert_allclose(assembled.state, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0] * 2, rtol=1e-6)
    assert assembled.stamp_ns == NOW
    assert assembled.stamps_ns == dict.fromkeys((*CAMERAS, LEFT, RIGHT), NOW)


@given(order=st.permutations(range(len(NAMES))), extras=st.integers(0, 3))
def test_joints_are_found_by_name_in_any_order(order: list[int], extras: int) -> None:
    assembler = filled()
    names = [NAMES[index] for index in order] + [f"extra_{index}" for index in range(extras)]
    positions = [POSITIONS[index] for index in order] + [float("nan")] * extras
    assembler.add_joint_state(LEFT, NOW, names, positions)
    np.testing.assert_array_equal(observation(assembler).state, observation(filled()).state)


@given(finger=st.floats(0.0, 0.1))
def test_the_gripper_is_mapped_from_its_finger(finger: float) -> None:
    assembler = filled(stamp_ns=NOW - 50 * MS)
    for camera in CAMERAS:
        assembler.add_image(camera, NOW, frame())
    assembler.add_joint_state(RIGHT, NOW, NAMES, [*POSITIONS[:-1], finger])
    assert observation(assembler).state[13] == pytest.approx((finger - 0.0440) / (0.0579 - 0.0440), abs=1e-5)


def test_the_newest_frame_is_used_and_only_that_is_decoded() -> None:
    assembler = filled(stamp_ns=NOW - 40 * MS)
    assembler.add_image("cam_high", NOW - 30 * MS, "not an image at all")
    assembler.add_image("cam_high", NOW, frame(77))
    assert observation(assembler).images["cam_high"][0, 0, 0] == 77


def test_a_frame_that_comes_late_does_not_replace_a_newer_one() -> None:
    assembler = filled()
    assembler.add_image("cam_high", NOW - 20 * MS, frame(77))
    assert observation(assembler).images["cam_high"][0, 0, 0] == 0


def test_the_observation_is_as_old_as_its_oldest_frame() -> None:
    assembler = filled()
    assembler.add_image("cam_high", NOW + 30 * MS, frame())
    assembler.add_image("cam_left_wrist", NOW + 10 * MS, frame())
    assert observation(assembler, NOW + 40 * MS).stamp_ns == NOW


@given(offsets=st.lists(st.integers(-400, 90), min_size=1, max_size=30, unique=True), out_of_order=st.randoms())
def test_joints_are_those_nearest_to_the_frames(offsets: list[int], out_of_order: Any) -> None:
    """Whatever order the samples come in, and newer ones though there are."""
    assembler = ObservationAssembler(PROFILE)
    for camera in CAMERAS:
        assembler.add_image(camera, NOW, frame())
    out_of_order.shuffle(offsets)
    for offset in offsets:
        for topic in (LEFT, RIGHT):
            assembler.add_joint_state(topic, NOW + offset * MS, NAMES, [float(offset), *POSITIONS[1:]])
    nearest = min(abs(offset) for offset in offsets)
    if nearest <= 100:
        assembled = observation(assembler, NOW + 95 * MS)
        assert abs(assembled.state[0]) == nearest
        assert abs(assembled.stamps_ns[LEFT] - NOW) == nearest * MS
    else:
        assert refusal(assembler, NOW + 95 * MS).key in (
            ((LEFT, "skew"), (RIGHT, "skew")),
            ((LEFT, "stale"), (RIGHT, "stale")),
        )


def test_two_drivers_may_share_a_topic() -> None:
    """An arm and its gripper, each publishing its own joints at its own rate."""
    assembler = filled()
    assembler.add_joint_state(LEFT, NOW + 1 * MS, NAMES[:6], [1.0] * 6)
    assembler.add_joint_state(LEFT, NOW + 2 * MS, NAMES[7:], [0.0440])
    for camera in CAMERAS:
        assembler.add_image(camera, NOW + 2 * MS, frame())
    np.testing.assert_allclose(observation(assembler, NOW + 2 * MS).state[:7], [1.0] * 6 + [0.0], atol=1e-6)


def test_messages_without_positions_are_passed_over() -> None:
    assembler = filled()
    assembler.add_joint_state(LEFT, NOW + 1 * MS, NAMES, [])
    assert observation(assembler).state[0] == np.float32(0.1)


# --- cameras that are not required ---


def test_a_camera_that_the_model_does_not_read_is_not_part_of_it() -> None:
    assert [camera.name for camera in ObservationAssembler(PROFILE).cameras] == list(CAMERAS)
    with pytest.raises(KeyError):
        ObservationAssembler(PROFILE).add_image("cam_low", NOW, frame())


def test_the_model_may_read_a_camera_that_the_profile_gives_no_slot() -> None:
    """A checkpoint that names ``cam_low`` itself; and it may read fewer than the profile has."""
    cameras = tuple(dataclasses.replace(camera, topic=f"/{camera.name}") for camera in PROFILE.cameras)
    assembler = ObservationAssembler(dataclasses.replace(PROFILE, cameras=cameras), cameras=("cam_low", "cam_high"))
    assert [camera.name for camera in assembler.cameras] == ["cam_high", "cam_low"]


@pytest.mark.parametrize("offset", [None, -600 * MS, -150 * MS, 300 * MS])
def test_an_optional_camera_is_left_out_while_absent_stale_or_of_another_moment(offset: int | None) -> None:
    assembler = ObservationAssembler(optional_wrist())
    for camera in CAMERAS[:2]:
        assembler.add_image(camera, NOW, frame())
    if offset is not None:
        assembler.add_image("cam_right_wrist", NOW + offset, frame())
    for topic in (LEFT, RIGHT):
        assembler.add_joint_state(topic, NOW, NAMES, POSITIONS)
    assert assembler.check(NOW) is None
    assembled = observation(assembler)
    assert list(assembled.images) == list(CAMERAS[:2])
    assert assembled.stamp_ns == NOW


def test_an_optional_camera_that_comes_back_is_part_of_it_again() -> None:
    assembler = ObservationAssembler(optional_wrist())
    for camera, offset in zip(CAMERAS, (0, 0, -600), strict=True):
        assembler.add_image(camera, NOW + offset * MS, frame())
    for topic in (LEFT, RIGHT):
        assembler.add_joint_state(topic, NOW, NAMES, POSITIONS)
    assert len(observation(assembler).images) == 2
    assembler.add_image("cam_right_wrist", NOW - 30 * MS, frame())
    assembled = observation(assembler)
    assert list(assembled.images) == list(CAMERAS)
    assert assembled.stamp_ns == NOW  # it does not make the observation older


def test_with_no_camera_at_all_there_is_no_observation() -> None:
    cameras = tuple(dataclasses.replace(camera, required=False) for camera in PROFILE.cameras)
    assembler = ObservationAssembler(dataclasses.replace(PROFILE, cameras=cameras))
    for topic in (LEFT, RIGHT):
        assembler.add_joint_state(topic, NOW, NAMES, POSITIONS)
    assert refusal(assembler).reason == "no camera has a fresh frame."
    assembler.add_image("cam_left_wrist", NOW - 20 * MS, frame())
    assert observation(assembler).stamp_ns == NOW - 20 * MS


# --- sets of frames ---


def test_a_set_is_complete_once_every_required_camera_has_brought_a_frame() -> None:
    assembler = ObservationAssembler(PROFILE)
    for moment in (NOW, NOW + 33 * MS):
        for camera in CAMERAS:
            assert not assembler.completes_set()
            assembler.add_image(camera, moment, frame())
        assert assembler.completes_set()
        assembler.add_joint_state(LEFT, moment + 10 * MS, NAMES, POSITIONS)
        assert not assembler.completes_set()


def test_after_a_lost_frame_the_next_sets_are_whole_again() -> None:
    assembler = filled()
    assert assembler.completes_set()
    whole = []
    for step in range(1, 5):
        moment = NOW + step * 33 * MS
        for topic in (LEFT, RIGHT):
            assembler.add_joint_state(topic, moment, NAMES, POSITIONS)
        for camera in CAMERAS:
            if (step, camera) != (1, "cam_high"):
                assembler.add_image(camera, moment, frame())
            if assembler.completes_set():
                whole.append(observation(assembler, moment).stamp_ns == moment)
    assert whole == [False, True, True]


def test_an_optional_camera_is_not_waited_for() -> None:
    assembler = ObservationAssembler(optional_wrist())
    for camera in CAMERAS[:2]:
        assembler.add_image(camera, NOW, frame())
    assert assembler.completes_set()
    cameras = tuple(dataclasses.replace(camera, required=False) for camera in PROFILE.cameras)
    assembler = ObservationAssembler(dataclasses.replace(PROFILE, cameras=cameras))
    assert assembler.completes_set()
    assert assembler.completes_set()


@pytest.mark.parametrize("how", ["stream", "clock", "reset"])
def test_a_new_beginning_begins_a_new_set(how: str) -> None:
    assembler = filled()
    assert assembler.completes_set()
    early = NOW - 10_000 * MS
    if how == "clock":
        assembler.assemble(NOW)
        assembler.assemble(early)
    elif how == "reset":
        assembler.reset()
    for camera in CAMERAS:
        assembler.add_image(camera, early, frame())
    assert assembler.completes_set()


# --- refusals ---


def test_every_stream_that_is_missing_is_named() -> None:
    refused = refusal(ObservationAssembler(PROFILE))
    topic = "/camera/color/image_rect_raw"
    assert refused.reason == (
        f"camera cam_high: no frame yet on /cam_high{topic}. "
        f"camera cam_left_wrist: no frame yet on /cam_left_wrist{topic}. "
        f"camera cam_right_wrist: no frame yet on /cam_right_wrist{topic}. "
        f"{LEFT}: no joint state yet. {RIGHT}: no joint state yet."
    )
    assert refused.is_waiting
    assert refused == ObservationAssembler(PROFILE).check(NOW)


def test_a_stream_that_stops_grows_stale() -> None:
    assembler = filled()
    assert isinstance(assembler.assemble(NOW + 500 * MS), AssembledObservation)
    assembler = filled()
    for topic in (LEFT, RIGHT):
        assembler.add_joint_state(topic, NOW + 1200 * MS, NAMES, POSITIONS)
    for camera in CAMERAS[1:]:
        assembler.add_image(camera, NOW + 1200 * MS, frame())
    refused = refusal(assembler, NOW + 1200 * MS)
    assert refused.reason == "camera cam_high: stale: newest frame is 1.2 s old, limit 0.5 s."
    assert refused.key == (("cam_high", "stale"),)
    assert refused.is_waiting
    later = assembler.check(NOW + 1300 * MS)
    assert later is not None
    assert later.key == refused.key
    assert later.reason != refused.reason


def test_stale_joint_states_are_named_by_topic() -> None:
    assembler = filled()
    for camera in CAMERAS:
        assembler.add_image(camera, NOW + 600 * MS, frame())
    assembler.add_joint_state(LEFT, NOW + 600 * MS, NAMES, POSITIONS)
    reason = refusal(assembler, NOW + 600 * MS).reason
    assert reason == f"{RIGHT}: stale: newest joint state is 0.6 s old, limit 0.5 s."


def test_frames_too_far_apart_are_refused() -> None:
    assembler = filled()
    assembler.add_image("cam_left_wrist", NOW + 150 * MS, frame())
    refused = refusal(assembler, NOW + 160 * MS)
    assert refused.key == (("cam_high", "skew"),)
    assert "0.15 s older than cam_left_wrist's, limit 0.1 s" in refused.reason


def test_joints_too_far_from_the_frames_are_refused() -> None:
    assembler = ObservationAssembler(PROFILE)
    for camera in CAMERAS:
        assembler.add_image(camera, NOW, frame())
    for topic, offset in ((LEFT, -50), (RIGHT, -200)):
        assembler.add_joint_state(topic, NOW + offset * MS, NAMES, POSITIONS)
    refused = refusal(assembler)
    assert refused.key == ((RIGHT, "skew"),)
    assert "0.20 s from the cameras' frames, limit 0.1 s" in refused.reason


def test_stamps_from_the_future_point_at_the_clocks() -> None:
    refused = refusal(filled(), NOW - 3000 * MS)
    assert all(kind == "ahead" for _, kind in refused.key)
    assert "stamped 3.00 s ahead of this node's clock" in refused.reason
    assert "use_sim_time" in refused.reason
    assert not refused.is_waiting
    assert isinstance(filled().assemble(NOW - 90 * MS), AssembledObservation)  # within the skew


def test_a_header_without_a_stamp_is_said_to_have_none() -> None:
    assembler = ObservationAssembler(PROFILE)
    assembler.add_image("cam_high", 0, frame())
    assert "camera cam_high: stale: its header.stamp is zero" in refusal(assembler).reason


def test_a_missing_joint_is_refused_by_name() -> None:
    assembler = ObservationAssembler(PROFILE)
    for camera in CAMERAS:
        assembler.add_image(camera, NOW, frame())
    assembler.add_joint_state(LEFT, NOW, NAMES[:7], POSITIONS[:7])
    assembler.add_joint_state(RIGHT, NOW, NAMES, POSITIONS)
    refused = refusal(assembler)
    assert refused.reason == f"joint left_finger is not in {LEFT}; it has {', '.join(NAMES[:7])}."
    assert not refused.is_waiting


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("joint", ["elbow", "left_finger"])
def test_a_position_that_is_not_finite_is_refused_by_name(value: float, joint: str) -> None:
    assembler = filled()
    positions = [value if name == joint else position for name, position in zip(NAMES, POSITIONS, strict=True)]
    assembler.add_joint_state(LEFT, NOW + 1 * MS, NAMES, positions)
    for camera in CAMERAS:
        assembler.add_image(camera, NOW + 1 * MS, frame())
    assert refusal(assembler, NOW + 1 * MS).reason == f"joint {joint} in {LEFT}: its position is {value}."


@pytest.mark.parametrize(
    ("names", "positions", "says"),
    [
        (NAMES, POSITIONS[:5], f"{LEFT}: a message has 8 names but 5 positions."),
        ([*NAMES[:-1], "waist"], POSITIONS, f"{LEFT}: joint waist occurs twice in one message."),
    ],
)
def test_a_malformed_joint_message_is_refused(names: list[str], positions: list[float], says: str) -> None:
    assembler = ObservationAssembler(PROFILE)
    for camera in CAMERAS:
        assembler.add_image(camera, NOW, frame())
    assembler.add_joint_state(LEFT, NOW, names, positions)
    assembler.add_joint_state(RIGHT, NOW, NAMES, POSITIONS)
    assert refusal(assembler).reason == says


def test_an_image_that_cannot_be_used_is_refused_with_camera_and_topic() -> None:
    assembler = filled()
    assembler.add_image("cam_high", NOW, np.zeros((4, 6), np.uint8))
    refused = refusal(assembler)
    assert refused.key == (("cam_high", "image"),)
    assert refused.reason.startswith("camera cam_high on /cam_high/camera/color/image_rect_raw: ")
    assert not refused.is_waiting


def test_a_corrupt_frame_is_told_from_a_wrong_encoding() -> None:
    @dataclasses.dataclass
    class CompressedImage:
        format: str
        data: bytes

    whole = cv2.imencode(".jpg", frame(9))[1].tobytes()
    assembler = filled()
    assembler.add_image("cam_high", NOW, CompressedImage("jpeg", whole[:-30]))
    assert refusal(assembler).key == (("cam_high", "corrupt"),)
    assert refusal(assembler).has("corrupt")
    assert assembler.corrupt_frames() == {"cam_high": 1, "cam_left_wrist": 0, "cam_right_wrist": 0}, "looked at twice"
    assembler.add_image("cam_high", NOW, CompressedImage("jpeg", whole))
    assert (observation(assembler).images["cam_high"] == 9).all()


@pytest.mark.parametrize("name", [name for name in profile_names() if name != "libero"])
def test_every_robot_that_ships_makes_its_example_of_its_streams(name: str) -> None:
    """As its drivers publish it: both arms of a topic in one message, the gripper in the unit of its joint."""
    profile, example = load_profile(name), make_example(load_profile(name))
    published: dict[str, dict[str, float]] = {}
    state = iter(np.asarray(example.state, np.float64))
    for arm in profile.arms:
        joints = published.setdefault(arm.state_topic or "", {})
        joints.update({joint: next(state) for joint in arm.joints})
        if arm.gripper is not None:
            closed, opened = arm.gripper.state_at_0, arm.gripper.state_at_1
            joints[arm.gripper.joint] = closed + next(state) * (opened - closed)
    assembler = ObservationAssembler(profile)
    for camera in assembler.cameras:
        assembler.add_image(camera.name, NOW, example.images[camera.name])
    for topic, joints in published.items():
        assembler.add_joint_state(topic, NOW, list(joints), list(joints.values()))
    assembled = observation(assembler)
    np.testing.assert_allclose(assembled.state, example.state, rtol=1e-5)
    assert list(assembled.images) == [camera.name for camera in profile.cameras if camera.slot]


def test_a_robot_without_topics_is_refused_at_once() -> None:
    with pytest.raises(ProfileError, match="libero: no topic is given for camera image, camera wrist_image, arm 0"):
        ObservationAssembler(load_profile("libero"))


# --- clocks that go back ---


def test_a_clock_that_goes_back_forgets_everything_and_says_so_once() -> None:
    notices: list[str] = []
    assembler = filled(on_notice=notices.append)
    observation(assembler)
    early = NOW - 10_000 * MS
    assert {kind for _, kind in refusal(assembler, early).key} == {"missing"}
    assert notices == ["the clock went back by 10.00 s; earlier samples are forgotten."]
    for camera in CAMERAS:
        assembler.add_image(camera, early, frame(5))
    for topic in (LEFT, RIGHT):
        assembler.add_joint_state(topic, early, NAMES, POSITIONS)
    assert observation(assembler, early).images["cam_high"][0, 0, 0] == 5
    assert len(notices) == 1


def test_a_stream_that_begins_anew_forgets_its_own_samples_and_says_so_once() -> None:
    """A bag that loops: the messages may go back before the clock is seen to."""
    notices: list[str] = []
    assembler = filled(on_notice=notices.append)
    early = NOW - 10_000 * MS
    for step in range(3):
        assembler.add_joint_state(LEFT, early + step * MS, NAMES, POSITIONS)
        assembler.add_image("cam_high", early + step * MS, frame(step))
    assert notices == [f"{LEFT}: its stamps went back by 10.00 s; earlier samples are forgotten."]
    arrivals = assembler.arrivals()
    assert arrivals["cam_high"] == (4, early + 2 * MS)
    assert arrivals[LEFT] == (4, early + 2 * MS)
    assert arrivals[RIGHT] == (1, NOW)


def test_a_jump_is_told_once_whoever_takes_part_and_the_next_one_again() -> None:
    notices: list[str] = []
    assembler = filled(on_notice=notices.append)
    for start in (NOW, NOW + 50 * MS):  # the bag begins anew, twice
        observation(assembler, start)
        for topic in (LEFT, RIGHT):
            assembler.add_joint_state(topic, start - 10_000 * MS, NAMES, POSITIONS)
        assembler.check(start - 10_000 * MS)
        for topic in (LEFT, RIGHT):
            assembler.add_joint_state(topic, start + 50 * MS, NAMES, POSITIONS)
        for camera in assembler.cameras:
            assembler.add_image(camera.name, start + 50 * MS, frame(1))
    assembler.add_joint_state(LEFT, NOW - 5_000 * MS, NAMES, POSITIONS)
    assert [notice.split("; ")[0] for notice in notices] == [
        f"{LEFT}: its stamps went back by 10.00 s",
        f"{LEFT}: its stamps went back by 10.00 s",
        f"{LEFT}: its stamps went back by 5.10 s",
    ]


def test_a_small_step_back_of_the_clock_is_no_new_beginning() -> None:
    notices: list[str] = []
    assembler = filled(on_notice=notices.append)
    observation(assembler, NOW + 20 * MS)
    observation(assembler, NOW)
    assert notices == []


def test_reset_forgets_but_keeps_counting() -> None:
    assembler = filled()
    assembler.reset()
    assert {kind for _, kind in refusal(assembler).key} == {"missing"}
    assert all(arrival == (1, None) for arrival in assembler.arrivals().values())


# --- the measured state ---


def test_the_measured_state_needs_no_camera() -> None:
    assembler = ObservationAssembler(PROFILE)
    for topic in (LEFT, RIGHT):
        assembler.add_joint_state(topic, NOW - 100 * MS, NAMES, POSITIONS)
        assembler.add_joint_state(topic, NOW, NAMES, [0.7, *POSITIONS[1:]])
    measured = assembler.measured_state(NOW)
    assert measured is not None
    np.testing.assert_allclose(measured, [0.7, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0] * 2, rtol=1e-6)


def test_the_measured_state_is_unknown_when_it_is_stale_or_absent_or_bad() -> None:
    assert ObservationAssembler(PROFILE).measured_state(NOW) is None
    assert filled().measured_state(NOW + 501 * MS) is None
    assembler = filled()
    assembler.add_joint_state(LEFT, NOW + 1 * MS, NAMES, [float("nan")] * 8)
    assembler.add_joint_state(RIGHT, NOW + 1 * MS, NAMES, POSITIONS)
    assert assembler.measured_state(NOW + 1 * MS) is None


def test_where_the_robot_stands_is_what_was_measured_just_now() -> None:
    assembler = filled()
    assembler.add_joint_state(RIGHT, NOW + 150 * MS, NAMES, [0.7, *POSITIONS[1:]])
    state = assembler.standing_state(NOW + 200 * MS)
    assert np.isnan(state[:7]).all(), "the left arm has been silent for too long"
    np.testing.assert_allclose(state[7:], [0.7, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0], rtol=1e-6)
    assembler.add_joint_state(LEFT, NOW + 190 * MS, NAMES, [float("nan"), *POSITIONS[1:]])
    assert np.isnan(assembler.standing_state(NOW + 200 * MS)[:7]).all()
    assert np.isnan(ObservationAssembler(PROFILE).standing_state(NOW)).all()


def test_what_float32_cannot_hold_is_no_position() -> None:
    assembler = filled()
    assembler.add_joint_state(LEFT, NOW + 1 * MS, NAMES, [1e39, *POSITIONS[1:]])
    state = assembler.standing_state(NOW + 1 * MS)
    assert np.isnan(state[:7]).all()
    assert np.isfinite(state[7:]).all()


# --- threads and memory ---


def test_the_history_of_a_fast_topic_stays_short() -> None:
    assembler = ObservationAssembler(PROFILE)
    for step in range(5000):
        assembler.add_joint_state(LEFT, NOW + step * MS, NAMES, POSITIONS)
    assert len(assembler._joints[LEFT].samples()) == 701  # 0.5 s + 2 x 0.1 s at 1 kHz
    for _ in range(5000):
        assembler.add_joint_state(LEFT, NOW + 5000 * MS, NAMES, POSITIONS)
    assert len(assembler._joints[LEFT].samples()) <= 4096


def test_threads_that_store_never_tear_an_observation() -> None:
    """Every frame carries its stamp in its pixels."""
    assembler = filled()
    for camera in CAMERAS:
        assembler.add_image(camera, NOW, frame(0))
    stop = threading.Event()

    def store(camera: str | None, topic: str | None) -> None:
        step = 0
        while not stop.is_set():
            step = (step + 1) % 90
            if camera:
                assembler.add_image(camera, NOW + step * MS, frame(step))
            if topic:
                assembler.add_joint_state(topic, NOW + step * MS, NAMES, [float(step), *POSITIONS[1:]])

    for topic in (LEFT, RIGHT):
        assembler.add_joint_state(topic, NOW, NAMES, [0.0, *POSITIONS[1:]])
    threads = [threading.Thread(target=store, args=(camera, None)) for camera in CAMERAS]
    threads += [threading.Thread(target=store, args=(None, topic)) for topic in (LEFT, RIGHT)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            result = assembler.assemble(NOW + 90 * MS)
            assert isinstance(result, AssembledObservation), result
            for camera in CAMERAS:
                assert int(result.images[camera][0, 0, 0]) == (result.stamps_ns[camera] - NOW) // MS
    finally:
        stop.set()
        for thread in threads:
            thread.join()
