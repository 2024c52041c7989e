"""Checks of what callers hand in: values of any kind become arrays that the model can take, or a clear error.

What comes out is a copy: a caller may use his buffers again at once, and nobody else's request is touched by it. All
functions raise ObservationError that names the field, what was expected and what came.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pi05_ros.errors import ObservationError
from pi05_ros.policy.profile import MAX_SIDE

FLOAT_IMAGE_SLACK = 1e-3
"""How far outside 0..1 rounding may put a float image; it is clipped."""


def as_image(field: str, value: Any) -> np.ndarray:
    """A camera image: [h, w, 3] (or [3, h, w]), uint8 as it is, any float dtype as float32 within 0..1."""
    array = _array(field, value)
    if array.ndim != 3 or 0 in array.shape or 3 not in (array.shape[0], array.shape[2]):
        raise ObservationError(field, f"expected [height, width, 3] or [3, height, width], got {list(array.shape)}")
    if array.shape[2] != 3:
        array = array.transpose(1, 2, 0)
    if max(array.shape) > MAX_SIDE:
        raise ObservationError(field, f"expected sides of {MAX_SIDE} pixels at most, got {list(array.shape)}")
    if array.dtype == np.uint8:
        return np.array(array, order="C")
    if array.dtype.kind != "f":
        raise ObservationError(field, f"expected uint8 (0..255) or a float dtype (0..1), got {array.dtype}")
    low, high = float(array.min()), float(array.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ObservationError(field, "expected finite numbers, got NaN or infinity")
    if low < -FLOAT_IMAGE_SLACK or high > 1.0 + FLOAT_IMAGE_SLACK:
        raise ObservationError(
            field, f"a float image is 0..1, got {low:.4g}..{high:.4g}; send uint8 if its range is 0..255"
        )
    return np.clip(array, 0.0, 1.0).astype(np.float32, order="C")


def as_numbers(field: str, value: Any) -> np.ndarray:
    """Real numbers of any shape, finite also as float32; float32 stays, all else becomes float64."""
    array = _array(field, value)
    if array.dtype.kind not in "fiu":
        raise ObservationError(field, f"expected numbers, got dtype {array.dtype}")
    array = np.array(array, dtype=np.float32 if array.dtype == np.float32 else np.float64)
    bad = np.argwhere(~np.isfinite(array))
    if bad.size:
        raise ObservationError(field, f"expected finite numbers, got {array[tuple(bad[0])]} at {bad[0].tolist()}")
    if array.size and np.abs(array).max() > np.finfo(np.float32).max:
        raise ObservationError(field, f"expected numbers that float32 can hold, got {np.abs(array).max():.3g}")
    return array


def as_vector(field: str, value: Any, dims: int, exact: bool) -> np.ndarray:
    """A vector of ``dims`` numbers (or at most so many), as ``as_numbers``."""
    array = as_numbers(field, value)
    if array.ndim != 1 or array.size == 0 or array.size > dims or (exact and array.size != dims):
        wanted = f"{dims} numbers" if exact else f"1 to {dims} numbers"
        raise ObservationError(field, f"expected {wanted}, got shape {list(array.shape)}")
    return array


def as_tokens(tokens: Any, token_mask: Any, vocab: int, limit: int) -> np.ndarray:
    """Token ids of a caller that tokenises by itself, [length] or [1, length], without padding: int64 [<= limit]."""
    ids = _flat("tokens", tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise ObservationError("tokens", f"expected integers [length], got {ids.dtype} {list(ids.shape)}")
    if token_mask is not None:
        mask = _flat("token_mask", token_mask)
        if mask.shape != ids.shape or mask.dtype.kind not in "biu":
            raise ObservationError(
                "token_mask", f"expected {ids.size} truth values, got {mask.dtype} {list(mask.shape)}"
            )
        ids = ids[mask.astype(bool)]
    if not 1 <= ids.size <= limit:
        raise ObservationError("tokens", f"expected 1 to {limit} real tokens, got {ids.size}")
    if ids.min() < 0 or ids.max() >= vocab:
        raise ObservationError("tokens", f"expected ids from 0 to {vocab - 1}, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int64)


def as_integer(field: str, value: Any, low: int, high: int) -> int:
    """An integer (Python's or numpy's) from ``low`` to ``high``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, (bool, np.bool_)) or not low <= number <= high:
        raise ObservationError(field, f"expected an integer from {low} to {high}, got {value!r}")
    return number


def as_switch(field: str, value: Any) -> bool | None:
    """True, False (Python's or numpy's) or None."""
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise ObservationError(field, f"expected True, False or None, got {value!r}")
    return None if value is None else bool(value)


def as_text(field: str, value: Any) -> str:
    """Text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ObservationError(field, f"expected text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ObservationError(field, f"expected text that is valid Unicode: {error}") from error
    return value


def as_masks(field: str, masks: Any) -> Mapping[str, bool]:
    """Truth values by camera name; None: no camera is masked."""
    if masks is None:
        return {}
    if not isinstance(masks, Mapping):
        raise ObservationError(field, f"expected a mapping by camera name, got {type(masks).__name__}")
    for name, value in masks.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ObservationError(f"{field}.{name}", f"expected true or false, got {value!r}")
    return masks


def _array(field: str, value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ObservationError(field, f"expected an array of numbers: {error}") from error


def _flat(field: str, value: Any) -> np.ndarray:
    """A vector, also where it comes as a batch of one."""
    array = _array(field, value)
    return array[0] if array.ndim == 2 and array.shape[0] == 1 else array
