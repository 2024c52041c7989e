"""Checks of what callers hand in: arrays of any kind become arrays that the model can take, or a clear error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from pi05_ros.errors import ObservationError


def as_image(field: str, value: Any) -> np.ndarray:
    """A camera image, checked: [h, w, 3] (or [3, h, w]), uint8 as it is, floats as finite float32 within 0..1.

    Raises ObservationError.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.ndim != 3 or 0 in array.shape or 3 not in (array.shape[0], array.shape[2]):
        raise ObservationError(field, f"expected [height, width, 3] or [3, height, width], got {list(array.shape)}")
    if array.shape[2] != 3:
        array = array.transpose(1, 2, 0)
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise ObservationError(field, f"expected uint8 (0..255) or a float dtype (0..1), got {array.dtype}")
    low, high = float(array.min()), float(array.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ObservationError(field, "expected finite numbers, got NaN or infinity")
    if low < 0.0 or high > 1.0:
        raise ObservationError(
            field, f"a float image is 0..1, got {low:.4g}..{high:.4g}; send uint8 if its range is 0..255"
        )
    return array.astype(np.float32)


def as_numbers(field: str, value: Any) -> np.ndarray:
    """Real, finite numbers of any shape. Raises ObservationError."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ObservationError(field, f"expected an array of numbers: {error}") from error
    if array.dtype.kind not in "fiu":
        raise ObservationError(field, f"expected numbers, got dtype {array.dtype}")
    bad = np.argwhere(~np.isfinite(array))
    if bad.size:
        raise ObservationError(field, f"expected finite numbers, got {array[tuple(bad[0])]} at {bad[0].tolist()}")
    return array


def as_vector(field: str, value: Any, dims: int, exact: bool) -> np.ndarray:
    """A finite vector of ``dims`` numbers (or at most so many), float32 if it was, else float64.

    Raises ObservationError.
    """
    array = as_numbers(field, value)
    if array.ndim != 1 or array.size == 0 or array.size > dims or (exact and array.size != dims):
        wanted = f"{dims} numbers" if exact else f"1 to {dims} numbers"
        raise ObservationError(field, f"expected {wanted}, got shape {list(array.shape)}")
    if np.abs(array).max() > np.finfo(np.float32).max:
        raise ObservationError(field, f"expected numbers that float32 can hold, got {np.abs(array).max():.3g}")
    return array if array.dtype == np.float32 else array.astype(np.float64)


def as_tokens(tokens: Any, token_mask: Any, vocab: int, limit: int) -> np.ndarray:
    """Token ids of a caller that tokenises by itself, [length] or [1, length], with padding removed: int64 [<= limit].

    Raises ObservationError.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size == 0:
        raise ObservationError("tokens", f"expected integers [length], got {tokens.dtype} {list(tokens.shape)}")
    if token_mask is not None:
        mask = np.asarray(token_mask)
        if mask.ndim == 2 and mask.shape[0] == 1:
            mask = mask[0]
        if mask.shape != tokens.shape or mask.dtype.kind not in "biu":
            raise ObservationError(
                "token_mask", f"expected {tokens.size} truth values, got {mask.dtype} {list(mask.shape)}"
            )
        tokens = tokens[mask.astype(bool)]
    if not 1 <= tokens.size <= limit:
        raise ObservationError("tokens", f"expected 1 to {limit} real tokens, got {tokens.size}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise ObservationError("tokens", f"expected ids from 0 to {vocab - 1}, got {tokens.min()} to {tokens.max()}")
    return tokens.astype(np.int64)
