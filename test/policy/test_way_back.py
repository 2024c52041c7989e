"""Actions back into model space, for every robot and both layouts: the inverse of what makes a chunk of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi05_ros.checkpoint import Checkpoint
from pi05_ros.checkpoint.description import RelativeActions
from pi05_ros.checkpoint.norm_stats import NormStats
from pi05_ros.engine import EngineResult
from pi05_ros.errors import ObservationError
from pi05_ros.model import Pi05Config
from pi05_ros.policy import Observation, RobotProfile, load_profile
from pi05_ros.policy.binding import bind
from pi05_ros.policy.loading import make_normalizers
from pi05_ros.policy.profile import profile_names
from pi05_ros.policy.translator import Translator

Layout = Literal["lerobot", "openpi"]
IMAGE = np.zeros((8, 8, 3), np.uint8)


def translator(
    profile: RobotProfile, layout: Layout, mode: str, relative: bool, adapt_to_pi: bool, constant: int | None = None
) -> Translator:
    """Of a checkpoint for that robot, with made-up statistics. constant: a dimension of one value only."""
    rng, dtype = np.random.default_rng(7), np.float32 if layout == "lerobot" else np.float64

    def stats(dims: int, constant: int | None = None) -> dict[str, np.ndarray]:
        middle, reach = rng.uniform(-1, 1, dims), rng.uniform(0.2, 2, dims)
        if constant is not None:
            reach[constant] = 0
        values = {"q01": middle - reach, "q99": middle + reach, "mean": middle, "std": reach}
        return {name: value.astype(dtype) for name, value in values.items()}

    checkpoint = Checkpoint(
        folder=Path("made-up"),
        layout=layout,
        config=Pi05Config.tiny(),
        cameras=tuple(camera.name for camera in profile.cameras if camera.slot) if layout == "lerobot" else (),
        state_dim=profile.state_dim,
        action_dim=profile.action_dim,
        normalization={"state": mode, "action": mode},
        norm_stats=NormStats(stats(profile.state_dim), stats(profile.action_dim, constant), "made-up"),
        relative_actions=RelativeActions(enabled=relative),
    )
    adapt = adapt_to_pi if layout == "openpi" and profile.transform == "aloha" else None
    binding = bind(checkpoint, profile, raw=False, adapt_to_pi=adapt, delta_actions=relative)
    return Translator(checkpoint, binding, make_normalizers(checkpoint, binding, off=False), None, "")


def to_robot(translator: Translator, profile: RobotProfile, model_actions: np.ndarray, state: np.ndarray) -> np.ndarray:
    """What a chunk of these model actions says, by the way that every chunk goes."""
    images = {camera.name: IMAGE for camera in profile.cameras if camera.slot}
    _, finish = translator.request(Observation(images, state, tokens=np.array([1, 2])))
    return finish(EngineResult(model_actions, {"prefix_ms": 0.0, "vision_ms": 0.0}, False, 1)).actions


@pytest.mark.parametrize("robot", profile_names())
@settings(deadline=None, max_examples=25)
@given(
    layout=st.sampled_from(["lerobot", "openpi"]),
    mode=st.sampled_from(["QUANTILES", "MEAN_STD"]),
    relative=st.booleans(),
    adapt_to_pi=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_chunk_and_back(robot: str, layout: Layout, mode: str, relative: bool, adapt_to_pi: bool, seed: int) -> None:
    profile = load_profile(robot)
    relative = relative and profile.action_names is None  # actions of another kind are relative to no state
    between = translator(profile, layout, mode, relative, adapt_to_pi)
    rng = np.random.default_rng(seed)
    state, later = rng.uniform(-1, 1, (2, profile.state_dim)).astype(np.float32)
    model_actions = np.zeros((20, 32), np.float32)
    model_actions[:, : profile.action_dim] = rng.normal(0, 1, (20, profile.action_dim))
    actions = to_robot(between, profile, model_actions, state)
    back = between.actions_to_model(actions, state)
    assert (back.shape, back.dtype) == ((20, 32), np.float32)
    assert np.abs(back - model_actions).max() < 2e-5
    # The same motion, seen from where the robot is one observation later.
    anew = between.actions_to_model(actions, later)
    assert np.abs(to_robot(between, profile, anew, later) - actions).max() < 1e-5
    assert np.array_equal(anew, back) != relative, "relative actions are relative to the state they go with"


@pytest.mark.parametrize("layout", ["lerobot", "openpi"])
def test_a_constant_dimension_comes_back_as_its_constant(layout: Layout) -> None:
    profile = load_profile("aloha_sim")
    between = translator(profile, layout, "QUANTILES", relative=True, adapt_to_pi=False, constant=3)
    state = np.linspace(-1, 1, 14, dtype=np.float32)
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 14))
    model_actions = between.actions_to_model(actions, state)
    assert np.abs(model_actions).max() < 20, "not divided by next to nothing"
    again = to_robot(between, profile, model_actions, state)
    others = [index for index in range(14) if index != 3]
    assert np.allclose(again[:, others], actions[:, others], atol=1e-5)
    assert np.ptp(again[:, 3]) == 0


def test_what_is_no_such_actions_is_refused_by_name() -> None:
    between = translator(load_profile("aloha_sim"), "lerobot", "QUANTILES", relative=False, adapt_to_pi=False)
    for actions, state, message in (
        (np.zeros((5, 13)), np.zeros(14), r"actions: expected \[rows, 14\], got \[5, 13\]"),
        (np.zeros(14), np.zeros(14), r"actions: expected \[rows, 14\], got \[14\]"),
        (np.full((5, 14), np.nan), np.zeros(14), "actions: expected finite"),
        (np.zeros((5, 14)), np.zeros(7), "state: expected 14"),
    ):
        with pytest.raises(ObservationError, match=message):
            between.actions_to_model(actions, state)
