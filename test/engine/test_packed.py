"""Packing moves weights and changes nothing; quantising gives up what it replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.small import TINY, alone, plain_path, request, tiny_model
from pi05_ros.engine.kernels.quantize import FLOAT8
from pi05_ros.engine.packed import FLOAT8_PARTS, PackedWeights, pack
from pi05_ros.engine.products import Matrix
from pi05_ros.model import Pi05Model


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of packed weights."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from tensors(one)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def storages(parts: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by address of each block of memory that tensors lie in."""
    blocks = (part.untyped_storage() for part in parts)
    return {block.data_ptr(): block.nbytes() for block in blocks if block.nbytes()}


def mlps(weights: PackedWeights) -> list[Matrix]:
    """What float8 replaces."""
    return [matrix for layer in weights.prefix.layers for matrix in (layer.gate_up, layer.down)]


@pytest.fixture
def model() -> Pi05Model:
    return tiny_model()


def test_the_plain_path_goes_on_bit_for_bit(model: Pi05Model) -> None:
    requests = [request(seed, cameras=((30, 40, "uint8"),)) for seed in (1, 2)]
    before = alone(plain_path(model), requests)
    for _ in range(2):
        pack(model)
        assert np.array_equal(alone(plain_path(model), requests), before)


def test_a_weight_is_held_once(model: Pi05Model) -> None:
    before = sum(storages(model.parameters()).values())
    weights = pack(model)
    packed = storages(tensors(weights))
    unpacked = storages(part for part in model.parameters() if part.untyped_storage().data_ptr() not in packed)
    derived = sum(scale.nbytes for layer in weights.prefix.layers for scale in (layer.input_scale, layer.mlp_scale))
    transposed = weights.expert.action_in.nbytes
    assert sum(packed.values()) + sum(unpacked.values()) == before + derived + transposed


def test_parameters_are_views_of_what_lies_together(model: Pi05Model) -> None:
    names = {name: parameter.clone() for name, parameter in model.named_parameters() if "proj.weight" in name}
    weights = pack(model)
    attention = model.prefix.layers[1].self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = weights.prefix.layers[1].qkv.weight
    assert torch.equal(qkv, torch.cat([part.weight for part in parts]))
    begin, row = qkv.data_ptr(), qkv.stride(0) * qkv.itemsize
    for part in parts:
        assert part.weight.data_ptr() == begin
        begin += len(part.weight) * row
    gate_up = weights.expert.gate_up
    for layer, mlp in enumerate(one.mlp for one in model.expert.layers):
        assert mlp.gate_proj.weight.data_ptr() == gate_up[layer].data_ptr()
        assert mlp.up_proj.weight.data_ptr() == gate_up[layer, TINY.expert.mlp :].data_ptr()
    for name, value in names.items():
        assert torch.equal(model.get_parameter(name), value), name
    assert all(part.is_contiguous() for part in tensors(weights))


def test_shapes(model: Pi05Model) -> None:
    weights, (vision, prefix, expert) = pack(model), (TINY.vision, TINY.prefix, TINY.expert)
    heads_width, qkv = prefix.heads * prefix.head_dim, (prefix.heads + 2) * prefix.head_dim
    layer = weights.prefix.layers[0]
    assert [tuple(one.weight.shape) for one in (layer.qkv, layer.out, layer.gate_up, layer.down)] == [
        (qkv, prefix.width),
        (prefix.width, heads_width),
        (2 * prefix.mlp, prefix.width),
        (prefix.width, prefix.mlp),
    ]
    assert [tuple(one.shape) for one in tensors(weights.expert)] == [
        (prefix.layers, qkv, expert.width),
        (prefix.layers, expert.width, heads_width),
        (prefix.layers, 2 * expert.mlp, expert.width),
        (prefix.layers, expert.width, expert.mlp),
        (TINY.action_dim, expert.width),
        (expert.width,),
        (TINY.action_dim, expert.width),
        (TINY.action_dim,),
    ]
    assert weights.vision.patch.weight.shape == (vision.width, 3 * vision.patch_size**2)
    assert (len(weights.vision.layers), len(weights.prefix.layers)) == (vision.layers, prefix.layers)
    assert torch.equal(layer.input_scale, 1.0 + model.prefix.layers[0].input_layernorm.weight)


def test_float8_replaces_the_models_own_matrices_of_mlps() -> None:
    originals = [one.weight.float() for one in mlps(pack(tiny_model("bfloat16")))]
    model, unquantized = tiny_model("bfloat16"), tiny_model("bfloat16")
    weights = pack(model, fp8=True)
    for one, original in zip(mlps(weights), originals, strict=True):
        assert (one.weight.dtype, one.scale.shape) == (FLOAT8, (1, len(original)))
        error = (one.weight.float() * one.scale.T - original).norm(dim=1)
        assert (error <= 0.05 * original.norm(dim=1)).all()
    linears = [part for layer in model.prefix.layers for part in layer.mlp.modules() if isinstance(part, nn.Linear)]
    assert len(linears) == 3 * TINY.prefix.layers
    assert all(part.weight.numel() == 0 for part in linears)
    bytes_of_both = sum(storages([*tensors(pack(unquantized)), *unquantized.parameters()]).values())
    halved = sum(original.numel() for original in originals)  # a byte for each number, where there were two
    scales = sum(4 * len(original) for original in originals)
    after = storages([*tensors(weights), *model.parameters()])
    assert sum(after.values()) == bytes_of_both - halved + scales


def test_float8_leaves_the_rest() -> None:
    model, before = tiny_model("openpi"), pack(tiny_model("openpi"))
    weights = pack(model, fp8=True)
    for mine, theirs in ((weights.expert, before.expert), (weights.vision, before.vision)):
        assert all(torch.equal(*pair) for pair in zip(tensors(mine), tensors(theirs), strict=True))
    for layer, own in zip(weights.prefix.layers, before.prefix.layers, strict=True):
        for name in vars(layer).keys() - set(FLOAT8_PARTS):
            parts = tensors(getattr(layer, name)), tensors(getattr(own, name))
            assert all(torch.equal(*pair) for pair in zip(*parts, strict=True)), name
    kept = (model.vision, model.projector, model.expert, model.prefix.layers[0].self_attn)
    others = [part for module in kept for part in module.modules()]
    assert all(part.weight.numel() for part in others if isinstance(part, nn.Linear))
