"""Which parameter is stored, and worked with, in which dtype.

"float32": all of them. "bfloat16": all of them in bfloat16. "openpi": bfloat16 with float32 islands, as openpi's
PyTorch policy has it: patch and position embedding, every RMSNorm (plain and adaptive), and the four heads around the
action expert. Activations inside a norm, the softmax, the time embedding and x_t are float32 in every precision.
"""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import nn

PRECISIONS = ("float32", "openpi", "bfloat16")

FLOAT32_ISLANDS = re.compile(
    r"vision\.(patch|position)_embedding\."
    r"|(prefix|expert)\..*norm\."
    r"|(action_in_proj|action_out_proj|time_mlp_in|time_mlp_out)\."
)


def parameter_dtype(name: str, precision: str) -> torch.dtype:
    """Dtype of the parameter of ``Pi05Model`` with that name. Raises ValueError: unknown precision."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "float32" or (precision == "openpi" and FLOAT32_ISLANDS.match(name)):
        return torch.float32
    return torch.bfloat16


def census(model: nn.Module) -> dict[str, int]:
    """Number of parameters by dtype, for example {"bfloat16": 3233713264, "float32": 119720608}."""
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return dict(counts)
