"""Sizes of the network. pi05_base is the default; everything else about Pi0.5 is fixed in the code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionConfig:
    """SigLIP So400m/14 vision tower: a square image becomes (image_size / patch_size)^2 tokens."""

    width: int = 1152
    layers: int = 27
    heads: int = 16
    mlp: int = 4304
    image_size: int = 224
    patch_size: int = 14

    @property
    def tokens(self) -> int:
        """Tokens of one image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class PrefixConfig:
    """Gemma-2B, which reads images and prompt."""

    width: int = 2048
    layers: int = 18
    mlp: int = 16384
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256
    vocab: int = 257152


@dataclass(frozen=True)
class ExpertConfig:
    """The action expert. Layers and heads are the prefix's: layer i reads keys and values of prefix layer i."""

    width: int = 1024
    mlp: int = 4096


@dataclass(frozen=True)
class Pi05Config:
    """A Pi0.5 network.

    horizon: action tokens of a chunk; no weight depends on it.
    action_dim: width of the (padded) action vector in model space.
    min_period, max_period: range of the sine and cosine periods of the time embedding.
    rope_frequencies: "float32", or "bfloat16" to repeat what casting whole modules does to the rotary frequencies in
        openpi's and LeRobot's bf16 policies (an error of up to 1 rad at position 800). Accurate by default.
    """

    vision: VisionConfig = VisionConfig()
    prefix: PrefixConfig = PrefixConfig()
    expert: ExpertConfig = ExpertConfig()
    horizon: int = 50
    action_dim: int = 32
    min_period: float = 0.004
    max_period: float = 4.0
    rope_frequencies: str = "float32"

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def pi05_base(cls) -> Pi05Config:
        """The published 3.35 billion parameters."""
        return cls()

    @classmethod
    def tiny(cls) -> Pi05Config:
        """Same structure, small enough for a CPU and a test: 1.3 million parameters, images of 56 x 56."""
        return cls(
            vision=VisionConfig(width=64, layers=2, heads=4, mlp=128, image_size=56, patch_size=14),
            prefix=PrefixConfig(width=128, layers=3, mlp=256, heads=8, kv_heads=1, head_dim=32, vocab=1024),
            expert=ExpertConfig(width=64, mlp=128),
        )

    @classmethod
    def from_architecture(cls, architecture: Mapping[str, Any] | None, **others: Any) -> Pi05Config:
        """From the object ``pi05_ros_architecture`` of a config.json; None means pi05_base.

        Raises ValueError that names the field: unknown, missing, or not a positive integer.
        """
        parts: dict[str, Any] = {}
        for name, kind in (("vision", VisionConfig), ("prefix", PrefixConfig), ("expert", ExpertConfig)):
            if architecture is None:
                continue
            given = architecture.get(name) if isinstance(architecture, Mapping) else architecture
            fields = [field.name for field in dataclasses.fields(kind)]
            if not isinstance(given, Mapping) or sorted(given) != sorted(fields):
                raise ValueError(
                    f"pi05_ros_architecture.{name}: expected an object with {', '.join(fields)}, got {given!r}"
                )
            for field, value in given.items():
                if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                    raise ValueError(
                        f"pi05_ros_architecture.{name}.{field}: expected a positive integer, got {value!r}"
                    )
            parts[name] = kind(**given)
        return cls(**parts, **others)

    def architecture(self) -> dict[str, dict[str, int]]:
        """The inverse of ``from_architecture``."""
        return {name: dataclasses.asdict(getattr(self, name)) for name in ("vision", "prefix", "expert")}

    def check(self) -> None:
        """Raise ValueError if the sizes do not fit each other."""
        vision, prefix = self.vision, self.prefix
        if not 0.0 < self.min_period < self.max_period < float("inf"):
            raise ValueError(f"expected 0 < min_period < max_period, got {self.min_period} and {self.max_period}")
        if self.rope_frequencies not in ("float32", "bfloat16"):
            raise ValueError(f"rope_frequencies: expected float32 or bfloat16, got {self.rope_frequencies!r}")
        for small, large, what in (
            (vision.patch_size, vision.image_size, "vision.image_size must be a multiple of vision.patch_size"),
            (vision.heads, vision.width, "vision.width must be a multiple of vision.heads"),
            (prefix.kv_heads, prefix.heads, "prefix.heads must be a multiple of prefix.kv_heads"),
            (2, prefix.head_dim, "prefix.head_dim must be even"),
            (2, self.expert.width, "expert.width must be even"),
        ):
            if large % small:
                raise ValueError(f"{what}, got {large} and {small}")
