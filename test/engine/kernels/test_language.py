"""Triton is optional."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WITHOUT_TRITON = """
import logging, pkgutil, sys
from importlib import import_module
from types import SimpleNamespace

sys.modules["triton"] = None  # its import now fails
logging.basicConfig(format="%(message)s")

import torch
from pi05_ros.engine import kernels
from pi05_ros.engine.kernels import language, norms

for module in pkgutil.iter_modules(kernels.__path__):
    import_module(f"{kernels.__name__}.{module.name}")

x, out = torch.ones(1, 8), torch.empty(1, 8)
norms.add_rms_norm(x, x.clone(), torch.ones(8), out)
print(out.sum().round().item())
print([language.runs_triton(SimpleNamespace(is_cuda=True)) for _ in range(2)])
"""


def test_without_triton_the_plain_twins_run_which_is_said_once() -> None:
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["8.0", "[False, False]"]
    assert len(result.stderr.splitlines()) == 1
    assert "Triton cannot be imported" in result.stderr
