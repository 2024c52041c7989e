"""SigLIP So400m/14: an image becomes a grid of tokens. No class token, no pooling head, no mask."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pi05_ros.model.config import VisionConfig

LAYER_NORM_EPS = 1e-6


class VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.width, config.width)
        self.k_proj = nn.Linear(config.width, config.width)
        self.v_proj = nn.Linear(config.width, config.width)
        self.out_proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width] -> [N, T, width]; every token sees every token of its own image."""
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).flatten(-2))


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.mlp)
        self.fc2 = nn.Linear(config.mlp, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipVision(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.width, kernel_size=config.patch_size, stride=config.patch_size)
        self.position_embedding = nn.Embedding(config.tokens, config.width)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.layers))
        self.post_layernorm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 3, S, S] in [-1, 1] -> tokens [N, (S / patch)^2, width], row by row.

        Patches and positions are added in the dtype of their weights (float32 in the "openpi" precision), the blocks
        run in the dtype of theirs.
        """
        # The patches do not overlap, so the convolution is one matrix product. Said as such it follows the precision of
        # matrix products; as a convolution a GPU would use TF32 unless told otherwise, which costs three digits.
        weight, bias = self.patch_embedding.weight, self.patch_embedding.bias
        size = self.patch_embedding.stride
        patches = F.linear(F.unfold(images.to(weight.dtype), size, stride=size).mT, weight.flatten(1), bias)
        x = (patches + self.position_embedding.weight).to(self.post_layernorm.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.post_layernorm(x)


def embed_images(vision: SiglipVision, projector: nn.Linear, images: Tensor, present: Tensor) -> Tensor:
    """All present images of a batch through one forward.

    images [B, N, 3, S, S], present [B, N] bool -> [B, N, T, prefix width]; rows of absent images are zero and cost
    nothing.
    """
    tokens = projector(vision(images[present]))
    embedded = tokens.new_zeros(*present.shape, *tokens.shape[1:])
    embedded[present] = tokens
    return embedded
