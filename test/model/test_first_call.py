"""What a process computes first is as exact as what it computes later."""

from __future__ import annotations

import subprocess
import sys

# MKL's vector functions went wrong in every third such process, when two threads called them together first.
PROGRAM = """
import sys
from pathlib import Path

import torch

from pi05_ros.checkpoint import load_model, make_checkpoint
from pi05_ros.model.gemma import rotary

load_model(make_checkpoint("tiny", Path(sys.argv[1])))
first, again = (rotary(torch.arange(8192)[None], 32, torch.float32).cos for _ in range(2))
sys.exit(not torch.equal(first, again))
"""


def test_the_first_table_of_a_process_is_as_exact_as_the_next(tmp_path):
    for run in range(4):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / f"tiny_{run}")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, f"run {run}: the first cosines differ from the second {result.stderr}"
