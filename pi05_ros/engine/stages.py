"""The stages of an inference on packed weights: patches -> image tokens -> keys and values of the prefix.

The same mathematics as ``model/`` with less work: nothing is masked, norms and activations are one kernel each, and the
last prefix layer stops at its keys and values. The third stage, the flow, is one kernel (``kernels/denoise.py``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pi05_ros.engine.kernels.attention import attend
from pi05_ros.engine.kernels.rotary import rotate_qkv
from pi05_ros.engine.packed import PrefixWeights, VisionWeights
from pi05_ros.engine.products import (
    Operand,
    gated,
    gelu_product,
    layer_normed,
    product,
    rms_normed,
)

# In order of preference; one that cannot do a shape, or is not there, is passed over.
VISION_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def encode_images(weights: VisionWeights, patches: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Patches [N, T, 3 * patch^2] in [-1, 1] -> image tokens [N, T, prefix width] of ``dtype``."""
    images, tokens, _ = patches.shape
    embedded = F.linear(patches, weights.patch.weight, weights.patch.bias) + weights.position
    x = embedded.to(weights.norm.weight.dtype).flatten(0, 1)
    delta = pending = None  # pending: the bias of the product that gave delta
    for layer in weights.layers:
        normed = layer_normed(x, delta, layer.norm1.weight, layer.norm1.bias, pending)
        qkv = product(normed, layer.qkv, x.dtype).view(images, tokens, 3, heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        with sdpa_kernel(VISION_ATTENTION, set_priority=True):
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        delta, pending = product(Operand(attended), layer.out.without_bias(), x.dtype), layer.out.bias
        normed = layer_normed(x, delta, layer.norm2.weight, layer.norm2.bias, pending)
        hidden = gelu_product(normed, layer.fc1, x.dtype)
        delta, pending = product(hidden, layer.fc2.without_bias(), x.dtype), layer.fc2.bias
    normed = layer_normed(x, delta, weights.norm.weight, weights.norm.bias, pending)
    return product(normed, weights.projector, x.dtype).to(dtype).view(images, tokens, -1)


def embed_prompt(weights: PrefixWeights, tokens: Tensor) -> Tensor:
    """Token ids [B, L] -> [B, L, W], scaled as Gemma wants it."""
    embedded = F.embedding(tokens, weights.embed_tokens)
    return embedded * embedded.shape[-1] ** 0.5


def encode_prefix(
    weights: PrefixWeights, x: Tensor, lengths: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
) -> None:
    """Fill the first P rows of keys and values, [layers, B, C, D], from embeddings x [B, P, W], which are used up.

    lengths: int32 [B], how many of the P positions count; nothing looks at the others. rope: cos and sin, float32
    [positions, D / 2].
    """
    batch, length, width = x.shape
    head_dim = keys.shape[-1]
    rows, delta = x.view(batch * length, width), None
    *layers, last = weights.layers
    for index, layer in enumerate(layers):
        qkv = product(rms_normed(rows, delta, layer.input_scale, layer.qkv), layer.qkv, x.dtype)
        q = x.new_empty(batch, length, layer.out.weight.shape[1] // head_dim, head_dim)
        rotate_qkv(qkv.view(batch, length, -1), *rope, q, keys[index], values[index])
        attended = torch.empty_like(q)
        attend(q, keys[index], values[index], lengths, attended)
        delta = product(Operand(attended.view(batch * length, -1)), layer.out, x.dtype)
        normed = rms_normed(rows, delta, layer.mlp_scale, layer.gate_up)
        delta = product(gated(normed, layer.gate_up, layer.down, x.dtype), layer.down, x.dtype)
    only_kv = last.qkv.last_rows(2 * head_dim)
    kv = product(rms_normed(rows, delta, last.input_scale, only_kv), only_kv, x.dtype)
    rotate_qkv(kv.view(batch, length, -1), *rope, x.new_empty(batch, length, 0, head_dim), keys[-1], values[-1])
