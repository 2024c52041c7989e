"""Arrays and images in the forms in which clients send them -> numpy arrays, within limits.

Numbers come as nested lists, as arrays (msgpack), or as {"values" or "data", "dtype", "shape"}; images also as JPEG or
PNG files: bytes, base64 text, a data URL, or {"b64_json" or "base64": text}.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from pi05_ros.errors import ObservationError
from pi05_ros.robot.images import ImageError, decode_compressed
from pi05_ros.server.codec import read_dtype
from pi05_ros.server.errors import RequestError, shown
from pi05_ros.server.limits import Limits

_KINDS = "biuf"
"""numpy's letters for truth values, integers and floats."""


def plain(value: Any) -> Any:
    """A numpy scalar, or an array of no dimensions, as the Python value in it; anything else as it is."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    return value


def is_unicode(text: str) -> bool:
    """False where JSON's escapes made halves of characters, which no reply could carry back."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_array(field: str, value: Any) -> np.ndarray:
    """An array of numbers in any of the forms above. Raises ObservationError."""
    if isinstance(value, Mapping):
        return _described_array(field, value)
    if isinstance(value, (str, bytes)):
        raise ObservationError(field, f"expected numbers, got {'text' if isinstance(value, str) else 'bytes'}")
    if isinstance(value, list) and _has_text(value):
        raise ObservationError(field, "expected an array of numbers, got text in a list")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ObservationError(field, f"expected an array of numbers: {error}") from error
    if array.dtype.kind not in _KINDS:
        raise ObservationError(field, f"expected an array of numbers, all rows of equal length, got {_name(value)}")
    return array


def _has_text(level: list[Any]) -> bool:
    """Somewhere in nested lists. numpy would make every element of the array as wide as the longest text."""
    while level:
        kinds = set(map(type, level))
        if any(issubclass(kind, (str, bytes)) for kind in kinds):
            return True
        if np.ndarray in kinds and any(type(one) is np.ndarray and one.dtype.kind in "SU" for one in level):
            return True
        level = list(chain.from_iterable(level if kinds == {list} else (one for one in level if type(one) is list)))
    return False


@dataclass
class ImageReader:
    """Reads the images of one request, which share a budget of pixels."""

    limits: Limits
    pixels: int = 0

    def read(self, field: str, value: Any) -> np.ndarray:
        """uint8 [h, w, 3] or [3, h, w] (0..255), or floats of that shape. Raises ObservationError, RequestError."""
        encoded = _encoded(field, value)
        if encoded is not None:
            return self._decode(field, encoded)
        array = as_array(field, value)
        self._charge(field, array.shape)
        if array.dtype.kind in "iu" and array.dtype != np.uint8:
            if array.size and not 0 <= array.min() <= array.max() <= 255:
                raise ObservationError(field, f"expected integers 0..255, got {array.min()}..{array.max()}")
            return array.astype(np.uint8)
        return array

    def _decode(self, field: str, data: bytes) -> np.ndarray:
        """The header is read first: a file of some bytes may unfold to gigabytes."""
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as header:
                width, height = header.size
                kind = "png" if header.format == "PNG" else "jpeg"  # or MPO: a JPEG with more pictures behind it
        except Image.DecompressionBombError as error:
            raise RequestError(413, f"{field}: the image is far larger than can be read: {error}", field) from error
        except Exception as error:  # Pillow raises many types for damaged headers
            raise ObservationError(
                field, f"expected a JPEG or PNG file, got {len(data)} bytes that are none"
            ) from error
        self._charge(field, (height, width, 3))
        try:
            return decode_compressed(SimpleNamespace(format=kind, data=data))
        except ImageError as error:
            raise ObservationError(
                field, f"the {kind.upper()} file of {width} x {height} cannot be read: {error}"
            ) from error

    def _charge(self, field: str, shape: tuple[int, ...]) -> None:
        side = self.limits.image_side
        if any(length > side for length in shape):
            raise RequestError(413, f"{field}: expected sides of {side} pixels at most, got {list(shape)}", field)
        self.pixels += math.prod(shape) // 3
        if self.pixels > self.limits.image_pixels:
            raise RequestError(
                413, f"{field}: expected {self.limits.image_pixels} pixels in all images at most, got more", field
            )


def _encoded(field: str, value: Any) -> bytes | None:
    """The bytes of an image file; None if it is no file."""
    if isinstance(value, Mapping):
        if "b64_json" not in value and "base64" not in value:
            return None
        value = value.get("b64_json", value.get("base64"))
        if not isinstance(value, str):
            raise ObservationError(field, f"expected base64 text, got {_name(value)}")
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if not isinstance(value, str):
        return None
    text = value.partition(",")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ObservationError(field, f"expected base64 text: {error}") from error


def _described_array(field: str, value: Mapping[Any, Any]) -> np.ndarray:
    """{"values" or "data", "dtype", "shape"}; dtype and shape may be left out where the values say them."""
    values = value.get("values", value.get("data"))
    if isinstance(values, Mapping):
        raise ObservationError(field, "expected numbers, got a map in a map")
    if values is None:
        raise ObservationError(field, f'expected "values" (or "data"), got {", ".join(map(shown, list(value)[:8]))}')
    dtype, shape = plain(value.get("dtype")), value.get("shape")
    if isinstance(values, (bytes, bytearray)):
        if dtype is None or shape is None:
            raise ObservationError(field, "bytes need their dtype and shape")
        array = np.frombuffer(_whole_items(field, values, _dtype(field, dtype)), _dtype(field, dtype))
    else:
        array = as_array(f"{field}.values", values)
        if dtype is not None:
            wanted = _dtype(field, dtype)
            if wanted.kind in "iu" and array.size and array.dtype.kind in "iuf":
                bounds = np.iinfo(wanted)
                if not bounds.min <= array.min() <= array.max() <= bounds.max:
                    raise ObservationError(field, f"expected values that {wanted} can hold, got others")
            with np.errstate(over="ignore", invalid="ignore"):  # what becomes infinite is refused by name later
                array = array.astype(wanted)
    return array if shape is None else _reshape(field, array, shape)


def _dtype(field: str, name: Any) -> np.dtype[Any]:
    dtype = read_dtype(f"{field}.dtype", name)
    if dtype.kind not in _KINDS:
        raise ObservationError(f"{field}.dtype", f"expected a dtype of numbers, got {shown(name)}")
    return dtype


def _whole_items(field: str, data: bytes | bytearray, dtype: np.dtype[Any]) -> bytes | bytearray:
    if len(data) % dtype.itemsize:
        raise ObservationError(field, f"{len(data)} bytes are no whole number of {dtype}")
    return data


def _reshape(field: str, array: np.ndarray, shape: Any) -> np.ndarray:
    sides = [plain(side) for side in shape] if isinstance(shape, (list, tuple, np.ndarray)) else None
    if sides is None or len(sides) > 16 or not all(type(side) is int and side >= 0 for side in sides):
        raise ObservationError(f"{field}.shape", f"expected a list of at most 16 sizes, got {shown(shape)}")
    if math.prod(sides) != array.size:
        raise ObservationError(f"{field}.shape", f"expected one for {array.size} values, got {sides}")
    return array.reshape(sides)


def _name(value: Any) -> str:
    """What came, in few words."""
    if isinstance(value, np.ndarray):
        return f"dtype {value.dtype}"
    return {"NoneType": "null", "str": "text"}.get(type(value).__name__, f"a {type(value).__name__}")
