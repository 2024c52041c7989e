"""The whole of Pi0.5 in plain PyTorch: images and prompt -> keys and values -> ten Euler steps -> action chunk.

This is the readable path and the oracle of every faster one. The same code runs every precision: each module works in
the dtype of its weights (see ``precision.py``), and tensors are cast where two dtypes meet. On a GPU, float32 matrix
products are as exact as PyTorch's own setting says ("highest" unless a program changed it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pi05_ros.model.config import Pi05Config
from pi05_ros.model.gemma import MASKED, ActionExpert, PrefixTransformer, rotary
from pi05_ros.model.rtc import Guide, RtcGuidance
from pi05_ros.model.siglip import SiglipVision, embed_images

TIME_GRIDS = ("lerobot", "openpi", "sglang")


@dataclass(frozen=True)
class Prefix:
    """What the action expert needs to know of images and prompt. P positions, W prefix width.

    embeddings [B, P, W]; pad_mask [B, P] bool, False where a position holds nothing; keys and values by layer, each
    [B, kv_heads, P, head_dim], keys after rotation. Read-only: the denoise steps never add to it.
    """

    embeddings: Tensor
    pad_mask: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def split(self) -> list[Prefix]:
        """One prefix a sample, each with memory of its own."""
        return [
            Prefix(
                self.embeddings[i : i + 1].clone(),
                self.pad_mask[i : i + 1].clone(),
                [layer[i : i + 1].clone() for layer in self.keys],
                [layer[i : i + 1].clone() for layer in self.values],
            )
            for i in range(self.pad_mask.shape[0])
        ]

    @staticmethod
    def stack(parts: list[Prefix]) -> Prefix:
        """Prefixes of equal length as one batch."""
        if len(parts) == 1:
            return parts[0]
        return Prefix(
            torch.cat([part.embeddings for part in parts]),
            torch.cat([part.pad_mask for part in parts]),
            [torch.cat(layers) for layers in zip(*(part.keys for part in parts), strict=True)],
            [torch.cat(layers) for layers in zip(*(part.values for part in parts), strict=True)],
        )


def time_grid(name: str, num_steps: int) -> Tensor:
    """Flow times of the denoise steps, float32 [num_steps], from 1 (noise) downwards.

    The three code bases differ in the last bits, and the time embedding turns that into 5e-5 in the actions:
    "lerobot" rounds 1 - s / n once; "openpi" accumulates float32(-1 / n); "sglang" takes a float32 linspace.
    Raises ValueError: unknown name, num_steps < 1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps: expected 1 or more, got {num_steps}")
    if name == "lerobot":
        step = -1.0 / num_steps
        return torch.tensor([1.0 + index * step for index in range(num_steps)], dtype=torch.float32)
    if name == "openpi":
        steps = torch.full((num_steps,), -1.0 / num_steps, dtype=torch.float32)
        times = [torch.ones((), dtype=torch.float32)]
        for step_size in steps[1:]:
            times.append(times[-1] + step_size)
        return torch.stack(times)
    if name == "sglang":
        return torch.linspace(1.0, 1.0 / num_steps, num_steps, dtype=torch.float32)
    raise ValueError(f"time_grid: expected one of {', '.join(TIME_GRIDS)}, got {name!r}")


def embed_time(time: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """Flow time float32 [B] -> float32 [B, width]: sines, then cosines, of log-spaced periods.

    Computed in float64: the shortest period turns t = 1 into 1571 rad, of which float32 keeps four decimals.
    """
    fractions = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    periods = min_period * (max_period / min_period) ** fractions
    angles = 2.0 * math.pi * time.to(torch.float64)[:, None] / periods
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


class Pi05Model(nn.Module):
    """B batch, N cameras, S image size, L prompt tokens, H horizon, A action_dim."""

    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.config = config
        width = config.expert.width
        self.vision = SiglipVision(config.vision)
        self.projector = nn.Linear(config.vision.width, config.prefix.width)
        self.prefix = PrefixTransformer(config.prefix)
        self.expert = ActionExpert(config.prefix, width, config.expert.mlp)
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def encode_prefix(self, images: Tensor, image_masks: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        """Read images and prompt.

        images float32 [B, N, 3, S, S] in [-1, 1]; image_masks bool [B, N]; tokens int64 [B, L]; token_mask bool [B, L].
        -> a Prefix of P = N * (S / patch)^2 + L positions. Every position sees every position that is not masked; what
        stands at masked positions is arbitrary.
        """
        image_embeddings = embed_images(self.vision, self.projector, images, image_masks)
        return self.encode_embedded(image_embeddings, image_masks, tokens, token_mask)

    def encode_embedded(
        self, image_embeddings: Tensor, image_masks: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> Prefix:
        """``encode_prefix`` of images that the vision tower has read: [B, N, T, W], see ``embed_images``."""
        token_embeddings = self.prefix.embed(tokens)
        embeddings = torch.cat((image_embeddings.flatten(1, 2).to(token_embeddings.dtype), token_embeddings), dim=1)
        pad_mask = torch.cat((image_masks.repeat_interleave(image_embeddings.shape[2], dim=1), token_mask), dim=1)

        positions = pad_mask.cumsum(dim=1) - 1
        rope = rotary(positions, self.config.prefix.head_dim, embeddings.dtype, self.config.rope_frequencies)
        # Padded queries get a fully masked row; nobody reads what comes of it.
        seen = pad_mask[:, None, :, None] & pad_mask[:, None, None, :]
        bias = None if bool(pad_mask.all()) else torch.where(seen, 0.0, MASKED)
        keys, values = self.prefix(embeddings, rope, bias)
        return Prefix(embeddings, pad_mask, keys, values)

    def condition(self, time: Tensor) -> Tensor:
        """Flow time float32 [B] -> the condition of the adaptive norms [B, expert width]."""
        config, dtype = self.config, self.time_mlp_in.weight.dtype
        embedded = embed_time(time, config.expert.width, config.min_period, config.max_period)
        return F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(embedded.to(dtype)))))

    def denoise_step(self, prefix: Prefix, x_t: Tensor, t: Tensor) -> Tensor:
        """Velocity of the flow, float32 [B, H, A], at x_t float32 [B, H, A] and time t float32 [B]."""
        batch, horizon, _ = x_t.shape
        dtype = prefix.keys[0].dtype
        starts = prefix.pad_mask.sum(dim=1, keepdim=True)
        positions = starts + torch.arange(horizon, device=x_t.device)
        rope = rotary(positions, self.config.prefix.head_dim, dtype, self.config.rope_frequencies)
        bias = None
        if not bool(prefix.pad_mask.all()):
            own = torch.ones(batch, horizon, dtype=torch.bool, device=x_t.device)
            seen = torch.cat((prefix.pad_mask, own), dim=1)
            bias = torch.where(seen, 0.0, MASKED)[:, None, None, :]
        x = self.action_in_proj(x_t.to(self.action_in_proj.weight.dtype)).to(dtype)
        x = self.expert(x, self.condition(t), rope, prefix.keys, prefix.values, bias)
        return self.action_out_proj(x.to(self.action_out_proj.weight.dtype)).float()

    def denoise(
        self, prefix: Prefix, noise: Tensor, num_steps: int, grid: str = "lerobot", rtc: RtcGuidance | None = None
    ) -> Tensor:
        """Integrate the flow from noise [B, H, A] to the action chunk, both float32, in normalised model space."""
        guide = None if rtc is None else Guide(rtc, noise)
        times = time_grid(grid, num_steps).to(noise.device)
        step = -1.0 / num_steps
        x = noise
        for index, time in enumerate(times):
            velocity_of = partial(self.denoise_step, prefix, t=time.expand(noise.shape[0]))
            velocity = velocity_of(x) if guide is None else guide.velocity(velocity_of, x, 1.0 + index * step)
            x = x + step * velocity
        return x

    @torch.no_grad()
    def sample_actions(
        self,
        images: Tensor,
        image_masks: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        noise: Tensor,
        num_steps: int = 10,
        time_grid: str = "lerobot",
        rtc: RtcGuidance | None = None,
    ) -> Tensor:
        """An action chunk, float32 [B, H, A] in normalised model space; arguments as in the other methods.

        What no sample of the batch uses (masked cameras, prompt padding) is dropped first; that is exact and free.
        """
        images, image_masks, tokens, token_mask = drop_unused(images, image_masks, tokens, token_mask)
        prefix = self.encode_prefix(images, image_masks, tokens, token_mask)
        return self.denoise(prefix, noise, num_steps, time_grid, rtc)


def drop_unused(
    images: Tensor, image_masks: Tensor, tokens: Tensor, token_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Without the cameras and the token columns that every sample of the batch masks."""
    cameras, columns = image_masks.any(dim=0), token_mask.any(dim=0)
    return images[:, cameras], image_masks[:, cameras], tokens[:, columns], token_mask[:, columns]
