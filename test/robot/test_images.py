"""Image messages to RGB: every encoding against its definition or OpenCV, every layout, every refusal."""

from __future__ import annotations

import array
import contextlib
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi05_ros.robot.images import RAW_ENCODINGS, CorruptImageError, ImageError, decode_image

CHANNELS = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1}
TWO_BYTES = ("yuv422", "uyvy", "yuv422_yuy2", "yuyv")
BAYER = ("bayer_rggb8", "bayer_bggr8", "bayer_gbrg8", "bayer_grbg8")


@dataclass
class Image:
    """The fields of sensor_msgs/Image."""

    height: int
    width: int
    encoding: str
    step: int
    data: Any
    is_bigendian: int = 0


@dataclass
class CompressedImage:
    """The fields of sensor_msgs/CompressedImage."""

    format: str
    data: Any = field(default_factory=bytes)


def image(pixels: np.ndarray, encoding: str, padding: int = 0, kind: type = bytes) -> Image:
    """A message of these pixels [h, w] or [h, w, c] with rows padded by so many bytes of 0xEE."""
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1)
    rows = np.concatenate([rows, np.full((height, padding), 0xEE, np.uint8)], axis=1)
    data = rows.tobytes()
    return Image(height, width, encoding, rows.shape[1], array.array("B", data) if kind is array.array else kind(data))


def random_pixels(height: int, width: int, channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def rgb_of(pixels: np.ndarray, encoding: str) -> np.ndarray:
    """What these channels mean, written without the code under test."""
    order = {"rgb8": "rgb", "bgr8": "bgr", "rgba8": "rgba", "bgra8": "bgra", "mono8": "m"}[encoding]
    return np.stack([pixels[:, :, order.index(colour if order != "m" else "m")] for colour in "rgb"], axis=2)


@given(
    encoding=st.sampled_from(sorted(CHANNELS)),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    padding=st.integers(0, 5),
    kind=st.sampled_from([bytes, array.array, list, bytearray, memoryview]),
    bigendian=st.integers(0, 1),
    seed=st.integers(0, 1000),
)
def test_channels_come_out_as_rgb(
    encoding: str, height: int, width: int, padding: int, kind: type, bigendian: int, seed: int
) -> None:
    pixels = random_pixels(height, width, CHANNELS[encoding], seed)
    message = image(pixels, encoding, padding, kind)
    message.is_bigendian = bigendian
    decoded = decode_image(message)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, rgb_of(pixels, encoding))


def test_rgb8_is_a_view_of_the_message() -> None:
    message = image(random_pixels(4, 6, 3), "rgb8", padding=2, kind=array.array)
    assert np.shares_memory(decode_image(message), np.frombuffer(message.data, np.uint8))


def test_no_stride_is_negative() -> None:
    """torch takes no array with negative strides."""
    for encoding, channels in CHANNELS.items():
        assert all(stride > 0 for stride in decode_image(image(random_pixels(4, 6, channels), encoding, 3)).strides)


@given(height=st.integers(1, 9), pairs=st.integers(1, 5), padding=st.integers(0, 5), seed=st.integers(0, 1000))
@pytest.mark.parametrize("encoding", TWO_BYTES)
def test_yuv422_is_bt601_by_its_byte_order(encoding: str, height: int, pairs: int, padding: int, seed: int) -> None:
    """Against the video-range BT.601 formula in floating point; OpenCV rounds within one or two levels of it."""
    packed = random_pixels(height, 2 * pairs, 2, seed)
    luma, chroma = (1, 0) if encoding in ("yuv422", "uyvy") else (0, 1)
    y = packed[:, :, luma].astype(float) - 16
    u = np.repeat(packed[:, 0::2, chroma], 2, axis=1).astype(float) - 128
    v = np.repeat(packed[:, 1::2, chroma], 2, axis=1).astype(float) - 128
    y = np.maximum(y, 0)
    expected = np.stack([1.164 * y + 1.596 * v, 1.164 * y - 0.813 * v - 0.391 * u, 1.164 * y + 2.018 * u], axis=2)
    decoded = decode_image(image(packed, encoding, padding))
    np.testing.assert_allclose(decoded, np.clip(expected, 0, 255), atol=2)


@pytest.mark.parametrize("encoding", BAYER)
@pytest.mark.parametrize("padding", [0, 3])
def test_bayer_patterns_are_told_apart(encoding: str, padding: int) -> None:
    """A uniformly coloured scene seen through each filter pattern comes back as that colour."""
    colour = {"r": 200, "g": 120, "b": 30}
    pattern = encoding.removeprefix("bayer_").removesuffix("8")
    mosaic = np.zeros((8, 10), np.uint8)
    for index, filtered in enumerate(pattern):
        mosaic[index // 2 :: 2, index % 2 :: 2] = colour[filtered]
    decoded = decode_image(image(mosaic, encoding, padding))
    np.testing.assert_array_equal(decoded, np.broadcast_to([200, 120, 30], (8, 10, 3)))


@given(
    encoding=st.sampled_from(RAW_ENCODINGS), height=st.integers(3, 20), pairs=st.integers(2, 10), pad=st.integers(0, 9)
)
def test_padding_never_shows(encoding: str, height: int, pairs: int, pad: int) -> None:
    channels = CHANNELS.get(encoding, 2 if encoding in TWO_BYTES else 1)
    pixels = random_pixels(height, 2 * pairs, channels)
    np.testing.assert_array_equal(decode_image(image(pixels, encoding, pad)), decode_image(image(pixels, encoding)))


# --- raw images that are refused ---


@pytest.mark.parametrize("encoding", ["16UC1", "32FC1", "mono16", "8UC1", "8UC3", "nv21", "rgb16", "", "RGB8"])
def test_other_encodings_are_refused_by_name(encoding: str) -> None:
    with pytest.raises(ImageError, match=r"known are rgb8, bgr8.*bayer_grbg8") as refusal:
        decode_image(image(random_pixels(4, 4, 3), encoding))
    assert encoding in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": b"\0" * 47}, "needs 48 bytes of data, got 47"),
        ({"data": b"\0" * 49}, "needs 48 bytes of data, got 49"),
        ({"data": b""}, "got 0"),
        ({"step": 11}, "step of at least 12 bytes, got 11"),
        ({"step": 0}, "step of at least 12 bytes, got 0"),
        ({"height": 0}, "height 0"),
        ({"width": 0}, "width 0"),
        ({"width": 4, "encoding": "rgba8"}, "rgba8 image 4 wide needs a step of at least 16"),
    ],
)
def test_layouts_that_do_not_add_up_are_refused(change: dict[str, Any], says: str) -> None:
    message = image(random_pixels(4, 4, 3), "rgb8")
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(ImageError, match=says):
        decode_image(message)


def test_yuv422_of_odd_width_is_refused() -> None:
    with pytest.raises(ImageError, match="odd width of 3"):
        decode_image(image(random_pixels(4, 3, 2), "yuv422"))


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4), (0, 4, 3), (3, 4, 4)])
def test_arrays_must_be_rgb(shape: tuple[int, ...]) -> None:
    with pytest.raises(ImageError, match=r"uint8 \[height, width, 3\]"):
        decode_image(np.zeros(shape, np.uint8))
    with pytest.raises(ImageError, match="float32"):
        decode_image(np.zeros((4, 4, 3), np.float32))


def test_anything_else_is_refused_by_type() -> None:
    with pytest.raises(ImageError, match="got int"):
        decode_image(7)


# --- compressed images ---

SCENE = cv2.resize(random_pixels(6, 8, 3), (64, 48), interpolation=cv2.INTER_CUBIC)


def encoded(rgb: np.ndarray, extension: str) -> bytes:
    return cv2.imencode(extension, cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR))[1].tobytes()


@pytest.mark.parametrize(
    "kind", [bytes, lambda data: array.array("B", data), lambda data: np.frombuffer(data, np.uint8)]
)
@pytest.mark.parametrize("text", ["png", "rgb8; png compressed bgr8", "bgr8; png compressed bgr8"])
def test_png_is_exact(text: str, kind: Any) -> None:
    np.testing.assert_array_equal(decode_image(CompressedImage(text, kind(encoded(SCENE, ".png")))), SCENE)


@pytest.mark.parametrize(
    "text", ["jpeg", "jpg", "JPEG", "rgb8; jpeg compressed bgr8", "bayer_rggb8; jpeg compressed bgr8"]
)
def test_jpeg_comes_out_as_rgb(text: str) -> None:
    decoded = decode_image(CompressedImage(text, encoded(SCENE, ".jpg")))
    assert np.abs(decoded.astype(int) - SCENE).mean() < 3


def test_channels_that_were_never_swapped_are_not_swapped_back() -> None:
    """``compressed rgb8``: RGB went into an encoder that takes BGR."""
    data = cv2.imencode(".png", SCENE)[1].tobytes()
    np.testing.assert_array_equal(decode_image(CompressedImage("rgb8; png compressed rgb8", data)), SCENE)


def test_grey_gets_three_channels() -> None:
    grey = SCENE[:, :, 0]
    data = cv2.imencode(".png", grey)[1].tobytes()
    decoded = decode_image(CompressedImage("mono8; png compressed mono8", data))
    np.testing.assert_array_equal(decoded, np.repeat(grey[:, :, None], 3, axis=2))


@pytest.mark.parametrize(
    "text",
    [
        "16UC1; compressedDepth png",
        "16UC1; png compressed ",
        "mono16; png compressed mono16",
        "h264",
        "",
        "bayer_rggb8; png compressed ",
        "rgb8; jpeg compressed rgb16",
    ],
)
def test_formats_without_colour_are_refused_by_name(text: str) -> None:
    with pytest.raises(ImageError, match="Compressed format") as refusal:
        decode_image(CompressedImage(text, encoded(SCENE, ".png")))
    assert repr(text) in str(refusal.value)
    assert not isinstance(refusal.value, CorruptImageError)


@given(cut=st.integers(0, 100_000), extension=st.sampled_from([".jpg", ".png"]))
def test_a_frame_cut_short_is_corrupt(cut: int, extension: str) -> None:
    whole = encoded(SCENE, extension)
    end = 2 if extension == ".jpg" else 8  # the end marker; a PNG ends with IEND and its checksum
    with pytest.raises(CorruptImageError):
        decode_image(CompressedImage("jpeg", whole[: cut % (len(whole) - end + 1)]))


@given(data=st.binary(max_size=200), head=st.sampled_from([b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n"]))
def test_noise_is_corrupt_never_a_crash(data: bytes, head: bytes) -> None:
    with pytest.raises(CorruptImageError):
        decode_image(CompressedImage("jpeg", head + data))


@given(position=st.integers(8, 100_000), value=st.integers(0, 255), extension=st.sampled_from([".jpg", ".png"]))
def test_a_wrong_byte_gives_an_image_or_the_one_error(position: int, value: int, extension: str) -> None:
    data = bytearray(encoded(SCENE, extension))
    data[position % len(data)] = value
    with contextlib.suppress(CorruptImageError):
        assert decode_image(CompressedImage("jpeg", bytes(data))).shape[2] == 3


def test_padding_after_a_jpeg_is_legal() -> None:
    decoded = decode_image(CompressedImage("jpeg", encoded(SCENE, ".jpg") + b"\0" * 100))
    assert decoded.shape == SCENE.shape


# --- cv_bridge ---

BRIDGE = """
class CvBridge:
    def imgmsg_to_cv2(self, message, encoding):
        import numpy
        if message.encoding != "nv21":
            raise RuntimeError("no such conversion")
        return numpy.full((message.height, message.width, 3), 7, numpy.uint8)
"""


@pytest.fixture
def bridge_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prefix with a cv_bridge in it, importable, but in no ament index."""
    folder = tmp_path / "prefix/lib/python3/site-packages/cv_bridge"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(BRIDGE)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "cv_bridge", raising=False)
    importlib.invalidate_caches()
    return tmp_path / "prefix"


def test_a_cv_bridge_that_is_not_ros_is_not_used(bridge_folder: Path) -> None:
    with pytest.raises(ImageError, match="'nv21' is not known"):
        decode_image(image(random_pixels(4, 4, 3), "nv21"))


def test_the_cv_bridge_of_a_ros_prefix_reads_what_we_do_not(
    bridge_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = bridge_folder / "share/ament_index/resource_index/packages"
    index.mkdir(parents=True)
    (index / "cv_bridge").touch()
    monkeypatch.setenv("AMENT_PREFIX_PATH", f"/nowhere:{bridge_folder}")
    assert (decode_image(image(random_pixels(4, 4, 3), "nv21")) == 7).all()
    with pytest.raises(ImageError, match="cv_bridge refuses it too: no such conversion"):
        decode_image(image(random_pixels(4, 4, 3), "rgb16"))
    with pytest.raises(ImageError, match="8UC3"):  # named by nobody: not even asked
        decode_image(image(random_pixels(4, 4, 3), "8UC3"))
