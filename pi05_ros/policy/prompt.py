"""The prompt as text: the instruction, and the state as words."""

from __future__ import annotations

import numpy as np

BINS = 256
_EDGES = np.linspace(-1.0, 1.0, BINS + 1)[:-1]


def clean(prompt: str) -> str:
    """The instruction as the model was trained to read it: one line, no underscores, otherwise as it was written."""
    return prompt.strip().replace("_", " ").replace("\n", " ")


def discretize(state: np.ndarray) -> np.ndarray:
    """Normalised state [dims] -> integers [dims]: 0..255 over [-1, 1), 255 above, and -1 below.

    The -1 is not a slip: neither reference clips, so the model has seen it.
    """
    return np.digitize(state, _EDGES) - 1


def prompt_text(prompt: str, state: np.ndarray) -> str:
    """Instruction and normalised state [dims] (the robot's real dimensions, unpadded) as Pi0.5 reads them."""
    words = " ".join(str(int(value)) for value in discretize(state))
    return f"Task: {clean(prompt)}, State: {words};\nAction: "
