"""Camera images to model input, in the two dialects that checkpoints were trained with.

Both keep the aspect ratio and centre the image on black. They differ by up to 0.08 (of 1) where an image is shrunk:
"openpi" resizes 8-bit images with Pillow's antialiased triangle filter, "lerobot" interpolates floats without
antialiasing.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

DIALECTS = ("lerobot", "openpi")


def fit(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """How an image fits a square of ``size``: (resized height, resized width, rows above, columns to the left).

    The resized shape is truncated and the smaller half of the padding comes first, as in both dialects. An image so
    long and thin that nothing would be left of a side keeps one row or column of it.
    """
    ratio = max(width / size, height / size)
    resized_height, resized_width = max(int(height / ratio), 1), max(int(width / ratio), 1)
    return resized_height, resized_width, (size - resized_height) // 2, (size - resized_width) // 2


def resize_openpi(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [h, w, 3] -> uint8 [size, size, 3], as openpi's client does it."""
    if image.shape[:2] == (size, size):
        return image
    height, width, top, left = fit(image.shape[0], image.shape[1], size)
    canvas = np.zeros((size, size, 3), dtype=np.uint8)
    # An axis at a time: left to itself, Pillow 13 resizes the height of some images first, and rounds differently.
    resized = Image.fromarray(image).resize((width, image.shape[0]), resample=Image.Resampling.BILINEAR)
    resized = resized.resize((width, height), resample=Image.Resampling.BILINEAR)
    canvas[top : top + height, left : left + width] = np.asarray(resized)
    return canvas


def resize_lerobot(image: Tensor, size: int) -> Tensor:
    """float32 [3, h, w] in [0, 1] -> [3, size, size] in [0, 1], as LeRobot does it."""
    if image.shape[1:] == (size, size):
        return image
    height, width, top, left = fit(image.shape[1], image.shape[2], size)
    resized = F.interpolate(image[None], size=(height, width), mode="bilinear", align_corners=False)[0].clamp(0.0, 1.0)
    return F.pad(resized, (left, size - width - left, top, size - height - top), value=0.0)


def image_to_model(image: np.ndarray, size: int, dialect: str) -> Tensor:
    """RGB [h, w, 3], uint8 (0..255) or float32 (0..1) -> float32 [3, size, size] in [-1, 1]."""
    if dialect == "openpi":
        if image.dtype != np.uint8:
            image = (255 * image).astype(np.uint8)  # truncates, as openpi does
        pixels = _to_tensor(resize_openpi(image, size))
        return pixels.float() / 255.0 * 2.0 - 1.0
    pixels = _to_tensor(image)
    if image.dtype == np.uint8:
        pixels = pixels.float() / 255.0
    return resize_lerobot(pixels, size) * 2.0 - 1.0


def _to_tensor(image: np.ndarray) -> Tensor:
    """[h, w, 3] of any strides -> [3, h, w]. Always a copy: views of a message may be read-only or mirrored."""
    return torch.from_numpy(np.array(image, order="C")).permute(2, 0, 1)
