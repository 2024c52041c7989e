"""Runs the model for many callers."""

from pi05_ros.engine.engine import Engine, EngineRequest, EngineResult

__all__ = ["Engine", "EngineRequest", "EngineResult"]
