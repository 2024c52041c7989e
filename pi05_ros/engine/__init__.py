"""Runs the model for many callers."""

from __future__ import annotations

import logging

from pi05_ros.engine.engine import Engine
from pi05_ros.engine.plain import PlainPath
from pi05_ros.engine.requests import EngineRequest, EngineResult, Outcome, Path
from pi05_ros.model import Pi05Model

logger = logging.getLogger(__name__)

COMPILE_MODES = ("plain", "eager", "graphs")


def make_path(model: Pi05Model, compile_mode: str, *, resize: str, time_grid: str, prefix_cache: int = 8) -> Path:
    """The path of a compile mode, for a model that is on its device. Raises ValueError that names the field."""
    if compile_mode not in COMPILE_MODES:
        raise ValueError(f"compile_mode: expected one of {', '.join(COMPILE_MODES)}, got {compile_mode!r}")
    if compile_mode != "plain":
        logger.warning("compile_mode %r is not available in this version: the plain path runs.", compile_mode)
    return PlainPath(model, resize=resize, time_grid=time_grid, prefix_cache=prefix_cache)


__all__ = [
    "COMPILE_MODES",
    "Engine",
    "EngineRequest",
    "EngineResult",
    "Outcome",
    "Path",
    "PlainPath",
    "make_path",
]
