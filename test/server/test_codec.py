"""The codec against bytes that openpi's client wrote, and against bytes that nobody should write."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgpack
import numpy as np
import pytest
from golden_cases import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from openpi_client import msgpack_numpy as openpi_numpy

from pi05_ros.errors import ObservationError
from pi05_ros.server.codec import pack, unpack

FOLDER = GOLDEN / "transforms"


def same(actual: Any, expected: Any) -> bool:
    """Equal in value, and arrays and scalars also in dtype and shape."""
    if isinstance(expected, dict) and set(expected) == {"ndarray", "dtype", "shape"}:
        wanted = np.array(expected["ndarray"], dtype=expected["dtype"]).reshape(expected["shape"])
        return (
            isinstance(actual, np.ndarray) and actual.dtype.str == expected["dtype"] and np.array_equal(actual, wanted)
        )
    if isinstance(expected, dict) and set(expected) == {"scalar", "dtype"}:
        return isinstance(actual, np.generic) and actual.dtype.str == expected["dtype"] and actual == expected["scalar"]
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(same(actual[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return all(same(a, e) for a, e in zip(actual, expected, strict=True))
    return bool(actual == expected)


@pytest.mark.parametrize("name", ["request", "response"])
def test_bytes_of_openpi_client(name: str) -> None:
    data = (FOLDER / f"msgpack_{name}.bin").read_bytes()
    message = unpack(data)
    assert same(message, json.loads((FOLDER / "msgpack.json").read_text())[name])
    assert pack(message) == data


ARRAY, SCALAR, DATA, DTYPE, SHAPE = (
    f"c4{len(name):02x}" + name.encode().hex() for name in ("__ndarray__", "__npgeneric__", "data", "dtype", "shape")
)
"""The keys as they are on the wire: bytes, not text."""


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (
            np.array([1, -2], np.float32),
            f"84 {ARRAY} c3 {DATA} c408 0000803f000000c0 {DTYPE} a33c6634 {SHAPE} 9102",
        ),
        (np.array([[1, 2], [3, 4]], np.uint8), f"84 {ARRAY} c3 {DATA} c404 01020304 {DTYPE} a37c7531 {SHAPE} 920202"),
        (np.float32(1.5), f"83 {SCALAR} c3 {DATA} cb3ff8000000000000 {DTYPE} a33c6634"),
        (np.bool_(True), f"83 {SCALAR} c3 {DATA} c3 {DTYPE} a37c6231"),
        (np.array("hi"), f"84 {ARRAY} c3 {DATA} c408 6800000069000000 {DTYPE} a33c5532 {SHAPE} 90"),
    ],
    ids=["float32", "uint8", "scalar", "truth value", "text"],
)
def test_bytes_of_the_protocol(value: Any, wire: str) -> None:
    """Both ways, and openpi's own code writes and reads the same."""
    data = bytes.fromhex(wire)
    assert pack(value) == data == openpi_numpy.packb(value)
    for back in (unpack(data), openpi_numpy.unpackb(data)):
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert np.array_equal(back, value)


def test_scalars_keep_their_types() -> None:
    scalars = unpack((FOLDER / "msgpack_request.bin").read_bytes())["nested"]["list"][3:]
    assert [type(one) for one in scalars] == [np.float32, np.int64, np.bool_]
    assert scalars == [1.5, -3, True]


def test_arrays_of_any_order_travel() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    for view in (np.asfortranarray(array), array[:, ::-1], array.transpose(2, 0, 1)):
        assert np.array_equal(unpack(pack({"a": view}))["a"], view)


@given(
    hnp.arrays(st.sampled_from(["<f4", "<f8", "|u1", "<i8", "|b1", "<f2", "<U3", ">i2"]), hnp.array_shapes(min_dims=0))
)
def test_round_trip(array: np.ndarray) -> None:
    back = unpack(pack(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array, equal_nan=array.dtype.kind == "f")
    assert not back.flags.writeable


def test_other_dialects_are_read() -> None:
    text_keys = msgpack.packb({"__ndarray__": True, "data": b"\0\0\x80?", "dtype": "<f4", "shape": [1]})
    assert unpack(text_keys) == np.float32(1)
    msgpack_numpy = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [1, 1], b"data": b"\0\0\x80?"}
    assert unpack(msgpack.packb(msgpack_numpy)).tolist() == [[1.0]]
    assert unpack(msgpack.packb({b"nd": False, b"type": "<f8", b"data": np.float64(2.5).tobytes()})) == 2.5
    assert unpack(msgpack.packb({"nd": 3})) == {"nd": 3}, "a user's own key is left alone"


def array_map(**changes: Any) -> bytes:
    entry = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    packed: bytes = msgpack.packb({"state": {**entry, **{key.encode(): value for key, value in changes.items()}}})
    return packed


def scalar_map(data: Any, dtype: str) -> bytes:
    packed: bytes = msgpack.packb({b"__npgeneric__": True, b"data": data, b"dtype": dtype})
    return packed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (array_map(dtype="|O"), "dtype: '|O' is not supported"),
        (array_map(dtype="<c8"), "dtype: '<c8' is not supported"),
        (array_map(dtype="|V4"), "dtype: '|V4' is not supported"),
        (array_map(dtype="nonsense"), "dtype: expected a numpy dtype string, got 'nonsense'"),
        (array_map(dtype="f4,f4"), "not supported"),
        (array_map(dtype=7), "dtype: expected a numpy dtype string, got 7"),
        (array_map(dtype="<U0"), "not supported"),
        (array_map(shape=[3]), "data: 8 bytes do not hold [3] of <f4"),
        (array_map(shape=[-2]), "shape: expected a list of sizes, got [-2]"),
        (array_map(shape=[2**40, 2**40]), "shape: expected a list of sizes"),
        (array_map(shape=[2**30] * 16), "do not hold"),
        (array_map(shape=[1] * 40), "at most 16 dimensions"),
        (array_map(shape=2), "shape: expected a list of sizes, got 2"),
        (array_map(shape=[True, 2]), "shape: expected a list of sizes"),
        (array_map(dtype="<U1", data=b"\xff" * 8), "data: no text: a character of <U1 is outside Unicode"),
        (array_map(data="text"), "data: expected bytes, got str"),
        (b"", "message: not readable as msgpack"),
        (b"\xc1", "message: not readable as msgpack"),
        (b"\x81" * 100_000, "message: not readable as msgpack"),
        (b"\x91" * 100_000 + b"\x01", "message: not readable as msgpack"),
        (b"\xdd\xff\xff\xff\xff", "message: not readable as msgpack"),
        (msgpack.packb({"a": 1}) + b"\x01", "message: not readable as msgpack"),
        (array_map(dtype="f4," * 99), "dtype: expected a numpy dtype string"),
        (array_map(dtype="T"), "dtype: 'T' is not supported"),
        (scalar_map("x", "<f4"), "data: expected a value of <f4, got 'x'"),
        (scalar_map([1.0], "<f4"), "data: expected a value of <f4, got [1.0]"),
        (scalar_map(10**12, "|S1"), "data: expected a value of |S1, got 1000000000000"),
        (scalar_map(300, "|i1"), "message: not readable as msgpack"),
        (scalar_map(1, "<c8"), "dtype: '<c8' is not supported"),
    ],
)
def test_malformed_messages_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ObservationError) as caught:
        unpack(data)
    assert message in str(caught.value)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ObservationError):
        unpack(data)


@settings(max_examples=300)
@given(st.data())
def test_damaged_messages_are_a_value_or_an_error(data: st.DataObject) -> None:
    original = bytearray((FOLDER / "msgpack_request.bin").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        original[data.draw(st.integers(0, len(original) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ObservationError):
        unpack(bytes(original))


@pytest.mark.parametrize("value", [np.zeros(2, complex), np.array([object()]), object(), {1, 2}, 2**70])
def test_what_cannot_travel_is_refused(value: Any) -> None:
    with pytest.raises(ObservationError, match="message: cannot be packed"):
        pack({"a": value})
