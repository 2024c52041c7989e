"""Random weights that keep activations sane: for tests, demos and benchmarks.

Every tensor has a generator of its own, seeded by the model's seed and the tensor's name, so that tensors can be made
one at a time and in any order. A seed means the same weights on devices of one kind, not on a CPU and a GPU.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from pi05_ros.model import Pi05Config, Pi05Model
from pi05_ros.model.precision import parameter_dtype

DENOISING = 2.5
"""How strongly the velocity of a random network points along x_t: enough to cancel the noise, found by trying."""


def random_model(config: Pi05Config, device: torch.device | str, precision: str, seed: int = 0) -> Pi05Model:
    """A model of random weights, made on the device one tensor at a time, ready for inference.

    The same seed gives the same weights in every precision, but for their rounding.
    Raises ValueError: unknown precision.
    """
    with torch.device("meta"):
        model = Pi05Model(config)
    for name, parameter in list(model.named_parameters()):
        value = random_tensor(name, parameter.shape, seed, device).to(parameter_dtype(name, precision))
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, torch.nn.Parameter(value, requires_grad=False))
    return model.eval()


def random_tensor(name: str, shape: torch.Size, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Values of a parameter, float32: drawn, except that action_out_proj undoes action_in_proj.

    The velocity of the flow then points along x_t, and what was noise at its start is mostly gone at its end. Chunks
    are smooth instead of white noise, and a simulated arm can follow them.
    """
    if name != "action_out_proj.weight":
        return _draw(name, shape, seed, device)
    action_in = _draw("action_in_proj.weight", torch.Size((shape[1], shape[0])), seed, device)
    return DENOISING * torch.linalg.pinv(action_in)


def _draw(name: str, shape: torch.Size, seed: int, device: torch.device | str) -> Tensor:
    """Values that keep activations of order one, so that a random network still has something to say."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    values = torch.randn(shape, generator=generator, device=device)
    if "norm" in name and name.startswith("vision") and name.endswith("weight"):
        return values.mul_(0.1).add_(1.0)
    if len(shape) == 1:
        return values.mul_(0.1)
    if "embed" in name and len(shape) == 2:
        return values.mul_(0.3 if "position" in name else shape[-1] ** -0.5)
    return values.mul_(shape[1:].numel() ** -0.5)
