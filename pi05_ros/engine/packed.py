"""The model's weights as the kernels want them: what is read together lies together.

Packing moves weights, it does not copy them: afterwards the model's own parameters are views of the packed tensors, so
the plain path goes on working and device memory holds every weight once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pi05_ros.engine.products import Matrix
from pi05_ros.model import Pi05Model
from pi05_ros.model.gemma import ActionExpert, ExpertLayer, PrefixLayer, PrefixTransformer, RMSNorm
from pi05_ros.model.siglip import SiglipVision, VisionLayer


@dataclass(frozen=True)
class Norm:
    """Of a LayerNorm: weight and bias [width]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class VisionLayerWeights:
    norm1: Norm
    qkv: Matrix
    out: Matrix
    norm2: Norm
    fc1: Matrix
    fc2: Matrix


@dataclass(frozen=True)
class VisionWeights:
    """patch: [width, 3 * patch * patch]; position: [tokens, width]; projector: vision width -> prefix width."""

    patch: Matrix
    position: Tensor
    layers: tuple[VisionLayerWeights, ...]
    norm: Norm
    projector: Matrix


@dataclass(frozen=True)
class PrefixLayerWeights:
    """qkv [(heads + 2) * D, W], out [W, heads * D], gate_up [2 F, W], down [W, F]; scales float32 [W], 1 + weight."""

    input_scale: Tensor
    qkv: Matrix
    out: Matrix
    mlp_scale: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class PrefixWeights:
    embed_tokens: Tensor
    layers: tuple[PrefixLayerWeights, ...]


@dataclass(frozen=True)
class ExpertWeights:
    """Of all L layers: qkv [L, (heads + 2) * D, W], out [L, W, heads * D], gate_up [L, 2 F, W], down [L, W, F].

    action_in [A, W], transposed; action_out [A, W]; their biases [W] and [A].
    """

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    action_in: Tensor
    action_in_bias: Tensor
    action_out: Tensor
    action_out_bias: Tensor


@dataclass(frozen=True)
class PackedWeights:
    vision: VisionWeights
    prefix: PrefixWeights
    expert: ExpertWeights


FLOAT8_PARTS = ("gate_up", "down")
"""The matrices of a prefix layer that are quantised: the large ones. Its others are a small part of the work, and
what is rounded before the attention's logits adds to the error. The vision tower would gain nothing: its GELU is free
inside a bfloat16 product, and a kernel of its own after a float8 one."""


@torch.no_grad()
def pack(model: Pi05Model, fp8: bool = False) -> PackedWeights:
    """Pack a model's weights in place (see the first lines). Packing again is harmless, but moves them again.

    fp8: the prefix's MLPs in float8, layer by layer; the model's own are empty afterwards.
    """
    return PackedWeights(
        _pack_vision(model.vision, model.projector),
        _pack_prefix(model.prefix, fp8),
        _pack_expert(model, model.expert),
    )


def _pack_vision(vision: SiglipVision, projector: nn.Linear) -> VisionWeights:
    layers = []
    for layer in vision.layers:
        assert isinstance(layer, VisionLayer)
        attention = layer.self_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        layers.append(
            VisionLayerWeights(
                norm1=_norm(layer.layer_norm1),
                qkv=Matrix(_join([part.weight for part in parts]), _join([part.bias for part in parts])),
                out=_matrix(attention.out_proj),
                norm2=_norm(layer.layer_norm2),
                fc1=_matrix(layer.mlp.fc1),
                fc2=_matrix(layer.mlp.fc2),
            )
        )
    patch = vision.patch_embedding
    assert patch.bias is not None
    return VisionWeights(
        patch=Matrix(patch.weight.detach().flatten(1), patch.bias.detach()),
        position=vision.position_embedding.weight.detach(),
        layers=tuple(layers),
        norm=_norm(vision.post_layernorm),
        projector=_matrix(projector),
    )


def _pack_prefix(prefix: PrefixTransformer, fp8: bool) -> PrefixWeights:
    layers = []
    for layer in prefix.layers:
        assert isinstance(layer, PrefixLayer)
        attention, mlp = layer.self_attn, layer.mlp
        packed = PrefixLayerWeights(
            input_scale=_scale(layer.input_layernorm),
            qkv=Matrix(_join([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])),
            out=Matrix(attention.o_proj.weight.detach()),
            mlp_scale=_scale(layer.post_attention_layernorm),
            gate_up=Matrix(_join([mlp.gate_proj.weight, mlp.up_proj.weight])),
            down=Matrix(mlp.down_proj.weight.detach()),
        )
        layers.append(_quantized(packed, layer) if fp8 else packed)
    return PrefixWeights(prefix.embed_tokens.weight.detach(), tuple(layers))


def _quantized(layer: PrefixLayerWeights, module: PrefixLayer) -> PrefixLayerWeights:
    """The layer with its MLP in float8; the module's own is empty afterwards."""
    for part in module.mlp.children():
        assert isinstance(part, nn.Linear)
        part.weight.data = part.weight.new_empty(0)
    matrices: dict[str, Any] = {name: getattr(layer, name).quantized() for name in FLOAT8_PARTS}
    return dataclasses.replace(layer, **matrices)


def _pack_expert(model: Pi05Model, expert: ActionExpert) -> ExpertWeights:
    layers = [layer for layer in expert.layers if isinstance(layer, ExpertLayer)]
    attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    return ExpertWeights(
        qkv=_stack([[one.q_proj.weight, one.k_proj.weight, one.v_proj.weight] for one in attentions]),
        out=_stack([[one.o_proj.weight] for one in attentions]),
        gate_up=_stack([[one.gate_proj.weight, one.up_proj.weight] for one in mlps]),
        down=_stack([[one.down_proj.weight] for one in mlps]),
        action_in=model.action_in_proj.weight.detach().T.contiguous(),
        action_in_bias=model.action_in_proj.bias.detach(),
        action_out=model.action_out_proj.weight.detach(),
        action_out_bias=model.action_out_proj.bias.detach(),
    )


def _matrix(module: nn.Linear) -> Matrix:
    return Matrix(module.weight.detach(), module.bias.detach())


def _norm(module: nn.LayerNorm) -> Norm:
    return Norm(module.weight.detach(), module.bias.detach())


def _scale(norm: RMSNorm) -> Tensor:
    return 1.0 + norm.weight.detach().float()


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Parameters [N_i, ...] as one tensor [sum of N_i, ...], of which they become views."""
    return _stack([parts])[0]


def _stack(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Equal groups of parameters [N_i, ...] as one tensor [groups, sum of N_i, ...], of which they become views."""
    first = groups[0]
    rows = sum(part.shape[0] for part in first)
    packed = torch.empty((len(groups), rows, *first[0].shape[1:]), dtype=first[0].dtype, device=first[0].device)
    for group, target in zip(groups, packed, strict=True):
        begin = 0
        for part in group:
            view = target[begin : begin + part.shape[0]]
            view.copy_(part)
            part.data = view  # frees the memory it had
            begin += part.shape[0]
    return packed
