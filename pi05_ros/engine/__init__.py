"""Runs the model for many callers."""

from __future__ import annotations

import logging

from pi05_ros.engine.engine import Engine
from pi05_ros.engine.fast import FastPath, check_fast_path
from pi05_ros.engine.plain import PlainPath
from pi05_ros.engine.requests import EngineRequest, EngineResult, Outcome, Path
from pi05_ros.model import Pi05Model

logger = logging.getLogger(__name__)

COMPILE_MODES = ("plain", "eager", "graphs")


def make_path(
    model: Pi05Model,
    compile_mode: str,
    *,
    resize: str,
    time_grid: str,
    prefix_cache: int = 8,
    fp8: bool = False,
) -> Path:
    """The path of a compile mode, for a model that is on its device. Raises ValueError that names the field."""
    if compile_mode not in COMPILE_MODES:
        raise ValueError(f"compile_mode: expected one of {', '.join(COMPILE_MODES)}, got {compile_mode!r}")
    if compile_mode == "plain":
        if fp8:
            raise ValueError("precision: fp8 needs compile_mode graphs or eager, the plain path has none")
        return PlainPath(model, resize=resize, time_grid=time_grid, prefix_cache=prefix_cache)
    graphs = compile_mode == "graphs"
    if graphs and model.action_in_proj.weight.device.type != "cuda":
        logger.info("compile_mode graphs needs a CUDA device: the same path runs uncaptured.")
    return FastPath(model, resize=resize, time_grid=time_grid, prefix_cache=prefix_cache, graphs=graphs, fp8=fp8)


__all__ = [
    "COMPILE_MODES",
    "Engine",
    "EngineRequest",
    "EngineResult",
    "FastPath",
    "Outcome",
    "Path",
    "PlainPath",
    "check_fast_path",
    "make_path",
]
