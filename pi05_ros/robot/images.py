"""Camera messages -> RGB arrays.

Takes any object that has the fields of ``sensor_msgs/Image`` or ``sensor_msgs/CompressedImage``: an rclpy message, one
read from a bag, or a stand-in. Nothing is guessed: an encoding that is not known is refused by name, and data that
does not fit ``height``, ``width`` and ``step`` exactly is refused as cv_bridge refuses it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pi05_ros.errors import Pi05Error

Rgb = np.ndarray
"""uint8 [height, width, 3]."""


class ImageError(Pi05Error, ValueError):
    """An image message cannot be used: its encoding, its format or its layout is not one that gives RGB."""


class CorruptImageError(ImageError):
    """The bytes of a compressed frame do not decode. One such frame is a matter of luck; many are a bad cable."""


def decode_image(message: Any) -> Rgb:
    """RGB uint8 [height, width, 3] of a raw or compressed image message, or of an array that is one already.

    The array may be a view of the message's buffer (rgb8), so the message must not be written to afterwards.

    Raises ImageError: unknown encoding or format, or a layout that does not add up; CorruptImageError: bytes that do
    not decode.
    """
    if isinstance(message, np.ndarray):
        if message.dtype != np.uint8 or message.ndim != 3 or message.shape[2] != 3 or 0 in message.shape:
            raise ImageError(f"Expected an array uint8 [height, width, 3], got {message.dtype} {list(message.shape)}.")
        return message
    if hasattr(message, "encoding"):
        return decode_raw(message)
    if hasattr(message, "format"):
        return decode_compressed(message)
    raise ImageError(f"Expected an Image or CompressedImage message or an array, got {type(message).__name__}.")


def decode_raw(message: Any) -> Rgb:
    """RGB of a ``sensor_msgs/Image``; ``is_bigendian`` has no meaning for the 8-bit encodings that are known.

    Raises ImageError: see ``decode_image``.
    """
    encoding = message.encoding
    if encoding in _RAW:
        channels, convert = _RAW[encoding]
        return convert(_pixels(message, channels))
    if encoding in _DEPTH:
        raise ImageError(f"Encoding {encoding} is depth or raw numbers, not colour; known are {_known()}.")
    bridge = _ros2_cv_bridge()
    if bridge is None:
        raise ImageError(f"Encoding {encoding!r} is not known; known are {_known()}.")
    try:
        return np.asarray(bridge.imgmsg_to_cv2(message, "rgb8"))
    except Exception as error:  # the C++ part raises types of its own
        raise ImageError(f"Encoding {encoding!r} is not known, and cv_bridge refuses it too: {error}") from error


def decode_compressed(message: Any) -> Rgb:
    """RGB of a ``sensor_msgs/CompressedImage`` (JPEG or PNG), in the orientation in which the pixels are stored.

    Raises ImageError: a format that is not an 8-bit JPEG or PNG; CorruptImageError: bytes that do not decode.
    """
    stored_as_rgb = _check_format(message.format)
    data = _bytes(message.data)
    frame = f"A frame of {data.size} bytes with format {message.format!r}"
    if not _is_whole(data.tobytes()):
        raise CorruptImageError(f"{frame} is cut short, or is no JPEG or PNG at all.")
    cv2 = _opencv("Compressed images")
    try:
        image = cv2.imdecode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise CorruptImageError(f"{frame} does not decode: {error}") from error
    if image is None or image.size == 0:
        raise CorruptImageError(f"{frame} does not decode.")
    return image if stored_as_rgb else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


# --- raw images ---


def _pixels(message: Any, channels: int) -> np.ndarray:
    """A view uint8 [height, width, channels] of the message's data, whatever padding ends its rows."""
    height, width, step, encoding = message.height, message.width, message.step, message.encoding
    if height <= 0 or width <= 0:
        raise ImageError(f"An {encoding} image must have pixels, got height {height} and width {width}.")
    if step < width * channels:
        need = width * channels
        raise ImageError(f"An {encoding} image {width} wide needs a step of at least {need} bytes, got {step}.")
    data = _bytes(message.data)
    if data.size != height * step:
        raise ImageError(
            f"An {encoding} image of {height} rows with a step of {step} bytes needs {height * step} bytes of data, "
            f"got {data.size}."
        )
    return data.reshape(height, step)[:, : width * channels].reshape(height, width, channels)


def _bytes(data: Any) -> np.ndarray:
    """A flat uint8 view of what a message holds: array.array (rclpy), bytes, an ndarray (bags), or a list (copied)."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    if isinstance(data, (list, tuple)):
        return np.array(data, dtype=np.uint8)
    return np.frombuffer(data, dtype=np.uint8)


def _rgb(pixels: np.ndarray) -> Rgb:
    return pixels


def _bgr(pixels: np.ndarray) -> Rgb:
    return np.ascontiguousarray(pixels[:, :, ::-1])


def _rgba(pixels: np.ndarray) -> Rgb:
    return np.ascontiguousarray(pixels[:, :, :3])


def _bgra(pixels: np.ndarray) -> Rgb:
    return np.ascontiguousarray(pixels[:, :, 2::-1])


def _mono(pixels: np.ndarray) -> Rgb:
    return np.repeat(pixels, 3, axis=2)


def _through_opencv(code: str) -> Callable[[np.ndarray], Rgb]:
    """A conversion that OpenCV does; ``code`` is the name of its constant without ``COLOR_``."""

    def convert(pixels: np.ndarray) -> Rgb:
        height, width = pixels.shape[:2]
        if code.startswith("YUV") and width % 2:
            raise ImageError(f"A YUV 4:2:2 image stores its columns in pairs, got an odd width of {width}.")
        if code.startswith("Bayer") and (height < 3 or width < 3):  # OpenCV leaves the border unset below this size
            raise ImageError(f"A Bayer image must be at least 3 x 3 to be interpolated, got {height} x {width}.")
        cv2 = _opencv(f"{code[: code.index('2')]} images")
        return cv2.cvtColor(np.ascontiguousarray(pixels), getattr(cv2, f"COLOR_{code}"))

    return convert


# OpenCV names a Bayer pattern after the second row's second and third pixel, ROS after the first row's first two.
_RAW: dict[str, tuple[int, Callable[[np.ndarray], Rgb]]] = {
    "rgb8": (3, _rgb),
    "bgr8": (3, _bgr),
    "rgba8": (4, _rgba),
    "bgra8": (4, _bgra),
    "mono8": (1, _mono),
    "yuv422": (2, _through_opencv("YUV2RGB_UYVY")),
    "uyvy": (2, _through_opencv("YUV2RGB_UYVY")),
    "yuv422_yuy2": (2, _through_opencv("YUV2RGB_YUY2")),
    "yuyv": (2, _through_opencv("YUV2RGB_YUY2")),
    "bayer_rggb8": (1, _through_opencv("BayerBG2RGB")),
    "bayer_bggr8": (1, _through_opencv("BayerRG2RGB")),
    "bayer_gbrg8": (1, _through_opencv("BayerGR2RGB")),
    "bayer_grbg8": (1, _through_opencv("BayerGB2RGB")),
}
RAW_ENCODINGS = tuple(_RAW)
"""Encodings of ``sensor_msgs/Image`` that are converted without cv_bridge."""

_DEPTHS = ("8U", "8S", "16U", "16S", "32S", "32F", "64F")
_DEPTH = frozenset(f"{depth}C{channels}" for depth in _DEPTHS for channels in "1234") | {"mono16"}


def _known() -> str:
    return ", ".join(RAW_ENCODINGS)


# --- compressed images ---


def _check_format(text: str) -> bool:
    """Whether the decoded channels are in RGB order though the codec says BGR.

    image_transport writes ``"<encoding>; <codec> compressed <stored encoding>"``, drivers often just ``"jpeg"``. Its
    ``compressed rgb8`` means that nobody swapped the channels before the encoder, which takes BGR.
    """
    encoding, _, rest = (part.strip() for part in text.lower().rpartition(";"))
    codec, _, stored = [*rest.split(), "", "", ""][:3]
    if "compresseddepth" in text.lower() or codec not in ("jpeg", "jpg", "png"):
        raise ImageError(f"Compressed format {text!r} is not known; known are jpeg and png (not compressedDepth).")
    if encoding not in ("", *_RAW) or stored not in ("", "rgb8", "bgr8", "mono8"):
        raise ImageError(f"Compressed format {text!r} holds no 8-bit colour image; known encodings are {_known()}.")
    if encoding.startswith("bayer") and stored not in ("rgb8", "bgr8"):
        raise ImageError(f"Compressed format {text!r} holds a raw Bayer pattern, which is no picture to a decoder.")
    return stored == "rgb8"


def _is_whole(data: bytes) -> bool:
    """Whether a JPEG or PNG runs to its end: OpenCV fills the rest of a cut-off JPEG with grey and reports success.

    Padding after the end is legal. In a JPEG, 0xFF within a scan is always escaped, so the last end marker follows the
    last start-of-scan marker exactly when the scan is whole.
    """
    if data.startswith(b"\xff\xd8"):
        return data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda") > 0
    return data.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in data


# --- optional libraries ---


def _opencv(purpose: str) -> Any:
    try:
        import cv2
    except ImportError as error:
        raise ImageError(f"{purpose} need OpenCV: install opencv-python-headless or python3-opencv.") from error
    return cv2


def _ros2_cv_bridge() -> Any | None:
    """A CvBridge of the ROS installation that is sourced, else None.

    The package of that name on PyPI is a rewrite which reads some encodings wrongly without an error; so only a
    cv_bridge that the ament index lists, and that lies below the same prefix, counts.
    """
    spec = importlib.util.find_spec("cv_bridge")
    if spec is None or spec.origin is None:
        return None
    for prefix in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep):
        listed = prefix and (Path(prefix) / "share/ament_index/resource_index/packages/cv_bridge").is_file()
        if listed and Path(spec.origin).resolve().is_relative_to(Path(prefix).resolve()):
            from cv_bridge import CvBridge

            return CvBridge()
    return None
