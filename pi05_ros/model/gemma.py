"""The two transformers of Pi0.5: Gemma-2B (the prefix) and the action expert, which differ in their norms only.

The prefix uses plain RMSNorm. The expert's norms are adaptive: scale, shift and gate come from the flow time. Both
share the attention geometry, so that an expert layer can read the keys and values of the prefix layer beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pi05_ros.model.config import PrefixConfig

RMS_NORM_EPS = 1e-6
ROPE_THETA = 10000.0
MASKED = -2.3819763e38
"""Added to the logits of keys that must not be seen. Finite on purpose (big_vision's value): a row in which every key
is masked becomes a uniform average, where -inf would give NaN."""


@dataclass(frozen=True)
class Rotary:
    """cos and sin of the rotary embedding at some positions, each [B, 1, T, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x [B, heads, T, head_dim]; the halves of head_dim are the two coordinates."""
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * self.cos - x2 * self.sin, x2 * self.cos + x1 * self.sin), dim=-1)


def rotary(positions: Tensor, head_dim: int, dtype: torch.dtype, frequencies: str = "float32") -> Rotary:
    """Rotary embedding of integer positions [B, T]: angles in float32, cos and sin in the activations' dtype."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    inverse = 1.0 / ROPE_THETA**exponents
    if frequencies == "bfloat16":
        inverse = inverse.to(torch.bfloat16).float()
    angles = (positions.float()[..., None] * inverse)[:, None]
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))


def normalize_rms(x: Tensor) -> Tensor:
    """x / rms(x) over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_NORM_EPS)


class RMSNorm(nn.Module):
    """Gemma's: the weight is stored as its deviation from one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (normalize_rms(x) * (1.0 + self.weight.float())).to(x.dtype)


class AdaptiveRMSNorm(nn.Module):
    """RMSNorm whose scale and shift, and a gate for the branch that it feeds, are a linear map of the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, width], condition [B, width] -> (normalised x, gate [B, 1, width]), both in x's dtype.

        The gate is used as it is; only the scale is a deviation from one.
        """
        modulation = self.dense(condition.to(self.dense.weight.dtype)).float()[:, None]
        scale, shift, gate = modulation.chunk(3, dim=-1)
        return (normalize_rms(x) * (1.0 + scale) + shift).to(x.dtype), gate.to(x.dtype)


class Attention(nn.Module):
    """Multi-query attention with rotary positions; no biases."""

    def __init__(self, config: PrefixConfig, width: int) -> None:
        super().__init__()
        self.head_dim, self.kv_heads = config.head_dim, config.kv_heads
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, rope: Rotary) -> tuple[Tensor, Tensor]:
        """x [B, T, width] -> rotated keys and plain values, each [B, kv_heads, T, head_dim]."""
        return rope.rotate(self._heads(self.k_proj(x))), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rope: Rotary, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """Queries of x [B, T, width] against keys and values [B, kv_heads, S, head_dim].

        bias: float32 [B, 1, T or 1, S], added to the logits; None: everything is seen.
        """
        q = rope.rotate(self._heads(self.q_proj(x)))
        # The query heads of one key-value head become rows of one matrix product.
        batch, _, length, _ = q.shape
        q = q.reshape(batch, self.kv_heads, -1, self.head_dim)
        logits = (q @ keys.mT) * self.head_dim**-0.5
        logits = logits.unflatten(2, (-1, length))
        if bias is not None:
            logits = logits + bias[:, :, None]
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
        attended = weights.flatten(2, 3) @ values
        attended = attended.view(batch, -1, length, self.head_dim).transpose(1, 2).flatten(-2)
        return self.o_proj(attended)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class PrefixLayer(nn.Module):
    def __init__(self, config: PrefixConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width)
        self.self_attn = Attention(config, config.width)
        self.post_attention_layernorm = RMSNorm(config.width)
        self.mlp = GatedMLP(config.width, config.mlp)

    def keys_values(self, x: Tensor, rope: Rotary) -> tuple[Tensor, Tensor]:
        return self.self_attn.keys_values(self.input_layernorm(x), rope)

    def forward(self, x: Tensor, rope: Rotary, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """-> (x, keys, values)"""
        normed = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(normed, rope)
        x = x + self.self_attn(normed, rope, keys, values, bias)
        return x + self.mlp(self.post_attention_layernorm(x)), keys, values


class PrefixTransformer(nn.Module):
    """Gemma-2B, run for its keys and values only."""

    def __init__(self, config: PrefixConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(PrefixLayer(config) for _ in range(config.layers))
        # In every checkpoint, never used: what follows the last keys and values does not reach the actions.
        self.norm = RMSNorm(config.width)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [B, L] -> [B, L, width], scaled by sqrt(width) as Gemma wants it (images are not)."""
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded * embedded.shape[-1] ** 0.5

    def forward(self, x: Tensor, rope: Rotary, bias: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """-> keys and values by layer, each [B, kv_heads, P, head_dim].

        The last layer's attention, MLP and the final norm are dead work here and skipped, which is exact.
        """
        keys, values = [], []
        for layer in self.layers[:-1]:
            x, layer_keys, layer_values = layer(x, rope, bias)
            keys.append(layer_keys)
            values.append(layer_values)
        last = self.layers[-1]
        assert isinstance(last, PrefixLayer)
        last_keys, last_values = last.keys_values(x, rope)
        return [*keys, last_keys], [*values, last_values]


class ExpertLayer(nn.Module):
    def __init__(self, config: PrefixConfig, width: int, mlp: int) -> None:
        super().__init__()
        self.input_layernorm = AdaptiveRMSNorm(width)
        self.self_attn = Attention(config, width)
        self.post_attention_layernorm = AdaptiveRMSNorm(width)
        self.mlp = GatedMLP(width, mlp)

    def forward(
        self, x: Tensor, condition: Tensor, rope: Rotary, keys: Tensor, values: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Action tokens x [B, H, width] see the prefix's keys and values and every action token."""
        normed, gate = self.input_layernorm(x, condition)
        own_keys, own_values = self.self_attn.keys_values(normed, rope)
        keys, values = torch.cat((keys, own_keys), dim=2), torch.cat((values, own_values), dim=2)
        x = x + self.self_attn(normed, rope, keys, values, bias) * gate
        normed, gate = self.post_attention_layernorm(x, condition)
        return x + self.mlp(normed) * gate


class ActionExpert(nn.Module):
    """Gemma-300M geometry without token embedding; its norms are adaptive."""

    def __init__(self, config: PrefixConfig, width: int, mlp: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(config, width, mlp) for _ in range(config.layers))
        self.norm = AdaptiveRMSNorm(width)

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        rope: Rotary,
        keys: list[Tensor],
        values: list[Tensor],
        bias: Tensor | None,
    ) -> Tensor:
        for layer, layer_keys, layer_values in zip(self.layers, keys, values, strict=True):
            x = layer(x, condition, rope, layer_keys, layer_values, bias)
        return self.norm(x, condition)[0]
