"""msgpack with numpy arrays, byte for byte as openpi's client writes it.

An array is a map with the bytes keys ``__ndarray__``, ``data`` (C order), ``dtype`` and ``shape``; a numpy scalar one
with ``__npgeneric__``. Reading also takes text keys (SGLang) and the ``nd`` maps of the msgpack-numpy package.
Nothing is ever unpickled: object, void and complex dtypes, and others that are no plain bytes, are refused in both
directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from pi05_ros.errors import ObservationError
from pi05_ros.server.errors import shown

_KINDS = "biufSUmM"
"""numpy's letters for what travels: truth values, integers, floats, bytes, text and times."""

_SCALARS: dict[str, tuple[type, ...]] = {
    "b": (bool,),
    "i": (int,),
    "u": (int,),
    "f": (int, float),
    "S": (bytes,),
    "U": (str,),
}
"""What a scalar of a kind is sent as. numpy would take more: an integer as bytes is that many zeros."""

_LONGEST_DTYPE = 64
"""Characters. Longer names describe many fields, which are refused anyway."""


def pack(value: Any) -> bytes:
    """Values, arrays and numpy scalars as msgpack. Raises ObservationError: a dtype or type that cannot travel."""
    try:
        packed: bytes = msgpack.packb(value, default=_encode)
    except (TypeError, ValueError, OverflowError) as error:
        raise ObservationError("message", f"cannot be packed: {error}") from error
    return packed


def unpack(data: bytes, max_values: int | None = None) -> Any:
    """The inverse of ``pack``; arrays are read-only views of ``data``. Raises ObservationError: malformed.

    max_values: of elements in all lists and maps together, so that few bytes do not become many objects.
    """
    values = 0

    def count(more: int) -> None:
        nonlocal values
        values += more + 1  # an empty one is a value too
        if max_values is not None and values > max_values:
            raise ObservationError("message", f"expected {max_values} values at most, got more")

    def read_list(items: list[Any]) -> list[Any]:
        count(len(items))
        return items

    def read_map(items: dict[Any, Any]) -> Any:
        count(len(items))
        return _decode(items)

    longest = len(data) if max_values is None else min(max_values, len(data))
    try:
        return msgpack.unpackb(
            data,
            object_hook=read_map,
            list_hook=read_list,
            strict_map_key=False,
            max_array_len=longest,
            max_map_len=longest,
        )
    except ObservationError:
        raise
    # The library raises ValueError, its subclasses, and for hostile nesting, sizes or hashing others.
    except (ValueError, TypeError, RecursionError, OverflowError, MemoryError, msgpack.UnpackException) as error:
        raise ObservationError("message", f"not readable as msgpack: {error or type(error).__name__}") from error


def _encode(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in _KINDS:
        raise ValueError(f"dtype {value.dtype} is not supported")
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"type {type(value).__name__} is not supported")


def _decode(value: dict[Any, Any]) -> Any:
    if _get(value, "__ndarray__") is True:
        return _array(_get(value, "data"), _get(value, "dtype"), _get(value, "shape"))
    if _get(value, "__npgeneric__") is True:
        return _scalar(_get(value, "data"), _get(value, "dtype"))
    if _get(value, "nd") is True and _get(value, "type") is not None:
        return _array(_get(value, "data"), _get(value, "type"), _get(value, "shape"))
    if _get(value, "nd") is False and _get(value, "type") is not None:
        return _array(_get(value, "data"), _get(value, "type"), ())[()]
    return value


def _get(value: Mapping[Any, Any], key: str) -> Any:
    return value.get(key.encode(), value.get(key))


def read_dtype(field: str, name: Any) -> np.dtype[Any]:
    """Raises ObservationError: no dtype, or one that does not travel."""
    if isinstance(name, bytes):
        name = name.decode("ascii", "replace")
    if not isinstance(name, str) or len(name) > _LONGEST_DTYPE:
        raise ObservationError(field, f"expected a numpy dtype string, got {shown(name)}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ObservationError(field, f"expected a numpy dtype string, got {name!r}") from error
    if dtype.kind not in _KINDS or dtype.itemsize == 0:
        raise ObservationError(field, f"{name!r} is not supported")
    return dtype


def _scalar(data: Any, dtype_name: Any) -> Any:
    dtype = read_dtype("dtype", dtype_name)
    if not isinstance(data, _SCALARS.get(dtype.kind, ())):
        raise ObservationError("data", f"expected a value of {dtype.str}, got {shown(data)}")
    return dtype.type(data)


def _array(data: Any, dtype_name: Any, shape: Any) -> np.ndarray:
    dtype = read_dtype("dtype", dtype_name)
    if not isinstance(shape, (list, tuple)) or not all(type(side) is int and 0 <= side < 2**31 for side in shape):
        raise ObservationError("shape", f"expected a list of sizes, got {shown(shape)}")
    if len(shape) > 16:
        raise ObservationError("shape", f"expected at most 16 dimensions, got {len(shape)}")
    if not isinstance(data, bytes):
        raise ObservationError("data", f"expected bytes, got {type(data).__name__}")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ObservationError("data", f"{len(data)} bytes do not hold {list(shape)} of {dtype.str}")
    if dtype.kind == "U" and len(data) and np.frombuffer(data, dtype=dtype.byteorder + "u4").max() > 0x10FFFF:
        raise ObservationError("data", f"no text: a character of {dtype.str} is outside Unicode")
    return np.frombuffer(data, dtype=dtype).reshape(shape)
