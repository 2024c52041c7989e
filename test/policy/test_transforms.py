"""Properties of transforms: round trips, arbitrary shapes, what clients of openpi send."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from pi05_ros.engine.images import DIALECTS, fit, image_to_model
from pi05_ros.errors import ObservationError
from pi05_ros.policy.normalization import Normalizer
from pi05_ros.policy.prompt import clean, discretize
from pi05_ros.policy.transforms import AlohaTransform, DroidTransform, LiberoTransform

FINITE = st.floats(-1e3, 1e3, allow_nan=False)


@given(
    hnp.arrays(np.float64, (4, 7), elements=FINITE),
    hnp.arrays(np.float64, 7, elements=FINITE),
    hnp.arrays(np.float64, 7, elements=st.floats(0.01, 1e3)),
    st.sampled_from(["QUANTILES", "MEAN_STD", "MIN_MAX"]),
)
def test_openpi_normalisation_round_trip(x: np.ndarray, low: np.ndarray, span: np.ndarray, mode: str) -> None:
    stats = {"q01": low, "q99": low + span, "min": low, "max": low + span, "mean": low, "std": span}
    normalizer = Normalizer(mode, stats, "openpi")
    before = x.copy()
    assert np.allclose(normalizer.unnormalize(normalizer.normalize(x)), x, atol=1e-9 * (1 + np.abs(x).max()))
    assert np.array_equal(x, before), "the input is not changed"


@given(st.integers(1, 5), st.integers(6, 12))
def test_dimensions_beyond_the_statistics_pass(covered: int, width: int) -> None:
    stats = {"q01": np.full(covered, -2.0), "q99": np.full(covered, 2.0)}
    x = np.arange(2.0 * width).reshape(2, width)
    back = Normalizer("QUANTILES", stats, "openpi").unnormalize(x)
    assert np.array_equal(back[:, covered:], x[:, covered:])
    assert not np.array_equal(back[:, :covered], x[:, :covered])


def test_constant_dimension() -> None:
    stats = {"q01": np.array([1.0], np.float32), "q99": np.array([1.0], np.float32)}
    x = np.array([1.0], np.float32)
    assert Normalizer("QUANTILES", stats, "lerobot").normalize(x) == -1.0
    wide = {name: value.astype(np.float64) for name, value in stats.items()}
    assert Normalizer("QUANTILES", wide, "openpi").normalize(x) == pytest.approx(-1.0)


@given(hnp.arrays(np.float64, (6, 14), elements=st.floats(-3, 3)))
def test_aloha_actions_round_trip(actions: np.ndarray) -> None:
    for adapt in (True, False):
        transform = AlohaTransform(adapt)
        assert np.allclose(transform.actions_to_robot(transform.actions_to_model(actions)), actions, atol=1e-12)


@given(hnp.arrays(np.float64, 14, elements=st.floats(-3, 3)))
def test_aloha_flips_exactly_its_four_joints(state: np.ndarray) -> None:
    before = state.copy()
    adapted = AlohaTransform(True).state_to_model(state)
    assert np.array_equal(state, before)
    for index in range(14):
        if index not in (6, 13):
            assert adapted[index] == (-state[index] if index in (1, 2, 8, 9) else state[index])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from(DIALECTS), st.booleans(), st.integers(0, 2**32 - 1))
def test_images_of_any_shape(height: int, width: int, dialect: str, as_float: bool, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    given_image = (image / 255.0).astype(np.float32) if as_float else image
    result = image_to_model(given_image, 56, dialect)
    assert result.shape == (3, 56, 56)
    assert result.dtype == torch.float32
    assert result.min() >= -1
    assert result.max() <= 1
    rows, columns, top, left = fit(height, width, 56)
    inside = torch.zeros(56, 56, dtype=torch.bool)
    inside[top : top + rows, left : left + columns] = True
    assert (result[:, ~inside] == -1).all(), "the border is black"
    assert max(rows, columns) >= 55
    assert 0 <= top <= 56 - rows - top <= top + 1, "centred, the smaller half first"


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_fit_keeps_the_aspect_ratio(height: int, width: int) -> None:
    rows, columns, _, _ = fit(height, width, 224)
    assert 1 <= rows <= 224
    assert 1 <= columns <= 224
    assert abs(rows - 224 * height / max(height, width)) <= 1.001
    assert abs(columns - 224 * width / max(height, width)) <= 1.001


def test_published_resize_geometry() -> None:
    assert fit(480, 640, 224) == (168, 224, 28, 0)
    assert fit(720, 1280, 224) == (126, 224, 49, 0)
    assert fit(225, 224, 224) == (224, 223, 0, 0) or fit(225, 224, 224)[:2] == (223, 223)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 7), st.booleans())
def test_strided_images_are_read_right(height: int, width: int, padding: int, flipped: bool) -> None:
    """Rows with padding behind them, as camera drivers send, and mirrored views."""
    buffer = np.random.default_rng(1).integers(0, 256, (height, width + padding, 3), dtype=np.uint8)
    view = buffer[:, :width]
    view = view[::-1, ::-1] if flipped else view
    for dialect in DIALECTS:
        assert torch.equal(image_to_model(view, 56, dialect), image_to_model(view.copy(), 56, dialect))


def test_float_images_by_dialect() -> None:
    image = np.full((56, 56, 3), 0.999, np.float32)  # 254.745 of 255
    assert image_to_model(image, 56, "openpi")[0, 0, 0] == pytest.approx(254 / 255 * 2 - 1), "openpi truncates"
    assert image_to_model(image, 56, "lerobot")[0, 0, 0] == pytest.approx(0.999 * 2 - 1)


def test_shrinking_differs_by_dialect_as_known() -> None:
    image = np.asarray(Image.effect_noise((320, 240), 100).convert("RGB"))
    a, b = (image_to_model(image, 56, dialect) for dialect in DIALECTS)
    assert (a - b).abs().max() > 0.1, "one antialiases, the other does not"


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20))
def test_bins(state: list[float]) -> None:
    """Bin k is what lies in [-1 + k / 128, -1 + (k + 1) / 128); below is -1, above is 255."""
    for value, bin_ in zip(state, discretize(np.array(state)), strict=True):
        assert -1 <= bin_ <= 255
        assert bin_ == -1 or value >= -1 + bin_ / 128
        assert bin_ == 255 or value < -1 + (bin_ + 1) / 128


@given(st.text())
def test_clean_prompts_are_one_line(text: str) -> None:
    cleaned = clean(text)
    assert "\n" not in cleaned
    assert "_" not in cleaned
    assert len(cleaned) == len(text.strip())


@pytest.mark.parametrize("transform", [AlohaTransform(True), DroidTransform(), LiberoTransform()])
def test_examples_are_observations(transform: AlohaTransform | DroidTransform | LiberoTransform) -> None:
    observation = transform.observation(transform.make_example())
    assert isinstance(observation.prompt, str)
    assert len(observation.images) >= 2
    dims = {"AlohaTransform": 14, "DroidTransform": 8, "LiberoTransform": 8}[type(transform).__name__]
    assert np.shape(observation.state) == (dims,)


def test_openpi_messages_of_every_form() -> None:
    message = DroidTransform.make_example() | {"prompt": b"wipe", "observation/gripper_position": 0.25}
    observation = DroidTransform().observation(message)
    assert observation.prompt == "wipe"
    assert observation.state[7] == 0.25
    assert DroidTransform().observation(message | {"prompt": np.array("fold")}).prompt == "fold"
    for prompt in (b"\xff", 3, np.array(["a", "b"])):
        with pytest.raises(ObservationError, match="prompt: expected"):
            DroidTransform().observation(message | {"prompt": prompt})
    del message["observation/joint_position"]
    with pytest.raises(
        ObservationError, match=r"observation/joint_position: missing; got .*observation/wrist_image_left"
    ):
        DroidTransform().observation(message)
