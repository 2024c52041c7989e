"""What must hold of the model besides the golden numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from pi05_ros.model import Pi05Config, Pi05Model
from pi05_ros.model.pi05 import embed_time, time_grid


@pytest.fixture(scope="module")
def model() -> Pi05Model:
    torch.manual_seed(3)
    return Pi05Model(Pi05Config.tiny()).eval().requires_grad_(False)


def inputs(cameras: int = 3, length: int = 9, batch: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "images": torch.rand(batch, cameras, 3, 56, 56, generator=generator) * 2 - 1,
        "image_masks": torch.ones(batch, cameras, dtype=torch.bool),
        "tokens": torch.randint(4, 1000, (batch, length), generator=generator),
        "token_mask": torch.ones(batch, length, dtype=torch.bool),
        "noise": torch.randn(batch, 50, 32, generator=generator),
    }


def test_masked_cameras_and_padding_are_dropped_exactly(model: Pi05Model) -> None:
    full = inputs(cameras=3, length=9)
    full["image_masks"][:, 1] = False
    full["token_mask"][:, 6:] = False
    full["images"][:, 1] = float("nan")  # must not be looked at
    short = dict(full)
    short["images"], short["image_masks"] = full["images"][:, [0, 2]], full["image_masks"][:, [0, 2]]
    short["tokens"], short["token_mask"] = full["tokens"][:, :6], full["token_mask"][:, :6]
    assert torch.equal(model.sample_actions(**full), model.sample_actions(**short))


def test_masked_work_costs_nothing(model: Pi05Model) -> None:
    """Dropped, not masked: the vision tower and the prefix never see them."""
    full = inputs(cameras=3, length=9)
    full["image_masks"][:, 1] = False
    full["token_mask"][:, 6:] = False
    seen: list[tuple[int, ...]] = []
    hooks = [
        model.vision.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape))),
        model.prefix.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape))),
    ]
    try:
        model.sample_actions(**full)
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == [(2, 3, 56, 56), (1, 2 * 16 + 6, 128)], (
        "one vision forward for both cameras, one prefix without padding"
    )


def test_an_absent_image_of_one_sample_costs_nothing(model: Pi05Model) -> None:
    batch = inputs(cameras=3, batch=2)
    batch["image_masks"][1, 0] = False
    seen: list[int] = []
    hook = model.vision.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    try:
        model.sample_actions(**batch)
    finally:
        hook.remove()
    assert seen == [5]


def test_the_last_prefix_layer_does_no_dead_work(model: Pi05Model) -> None:
    last = model.prefix.layers[-1]

    def fail(*_: object) -> None:
        raise AssertionError("dead work was done")

    hooks = [module.register_forward_pre_hook(fail) for module in (last.mlp, last.self_attn.o_proj, model.prefix.norm)]
    try:
        model.sample_actions(**inputs())
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("field", ["images", "tokens", "noise"])
def test_every_input_matters(model: Pi05Model, field: str) -> None:
    before = inputs()
    after = {**before, field: before[field].flip(-1)}
    assert not torch.allclose(model.sample_actions(**before), model.sample_actions(**after), atol=1e-4)


def test_a_sample_is_the_same_alone_and_in_a_batch(model: Pi05Model) -> None:
    batch = inputs(batch=3)
    batch["token_mask"][1, 4:] = False
    batch["image_masks"][2, 0] = False
    together = model.sample_actions(**batch)
    for index in range(3):
        alone = model.sample_actions(**{name: value[index : index + 1] for name, value in batch.items()})
        assert (alone[0] - together[index]).abs().max() < 2e-6 * float(together.abs().max())


def test_time_grids_are_the_references_own() -> None:
    # Values of the three code bases for ten steps, float32.
    openpi = [1.0, 0.89999998, 0.79999995, 0.69999993, 0.5999999, 0.49999991, 0.39999992, 0.29999992, 0.19999993]
    assert torch.allclose(time_grid("openpi", 10)[:9], torch.tensor(openpi), rtol=0, atol=1e-8)
    assert torch.equal(time_grid("lerobot", 10), torch.tensor([1.0 - step / 10 for step in range(10)]))
    assert torch.equal(time_grid("sglang", 10), torch.linspace(1.0, 0.1, 10))
    for steps in (1, 3, 7, 1000):
        for name in ("openpi", "lerobot", "sglang"):
            grid = time_grid(name, steps)
            assert len(grid) == steps
            assert grid[0] == 1.0
            assert grid[-1] > 0
    with pytest.raises(ValueError, match=r"num_steps: expected 1 or more, got 0"):
        time_grid("lerobot", 0)
    with pytest.raises(ValueError, match="time_grid: expected one of lerobot, openpi, sglang"):
        time_grid("euler", 10)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (1.0, [-1.6070832e-13, -0.78321898, -0.252885669, 1, 1, -0.621745944, 0.967496157, 6.12323426e-17]),
        (0.9, [-3.74507035e-05, -0.132282153, 0.855512738, 0.987688363, 1, 0.99121213, 0.517781734, 0.156434506]),
        (0.5, [-8.035416e-14, 0.90048486, -0.12748301, 0.707106769, 1, -0.43488735, 0.99184078, 0.707106769]),
    ],
)
def test_time_embedding_is_computed_in_float64(time: float, expected: list[float]) -> None:
    embedded = embed_time(torch.tensor([time]), 1024, 0.004, 4.0)[0]
    indices = [0, 1, 255, 511, 512, 513, 767, 1023]
    assert embedded.dtype == torch.float32
    assert torch.allclose(embedded[indices], torch.tensor(expected), rtol=1e-7, atol=1e-12)


def test_rope_frequencies_can_repeat_the_references_rounding(model: Pi05Model) -> None:
    rounded = Pi05Model(dataclasses.replace(model.config, rope_frequencies="bfloat16")).eval()
    rounded.load_state_dict(model.state_dict())
    difference = (rounded.sample_actions(**inputs()) - model.sample_actions(**inputs())).abs().max()
    assert 1e-5 < difference < 0.5
    with pytest.raises(ValueError, match="rope_frequencies: expected float32 or bfloat16, got 'half'"):
        Pi05Config(rope_frequencies="half")


def test_architecture_round_trip_and_its_errors() -> None:
    config = Pi05Config.tiny()
    assert Pi05Config.from_architecture(config.architecture()) == config
    assert Pi05Config.from_architecture(None) == Pi05Config.pi05_base()
    broken = config.architecture()
    broken["prefix"]["heads"] = 0
    with pytest.raises(ValueError, match=r"pi05_ros_architecture\.prefix\.heads: expected a positive integer, got 0"):
        Pi05Config.from_architecture(broken)
    broken = config.architecture()
    del broken["vision"]["mlp"]
    with pytest.raises(ValueError, match=r"pi05_ros_architecture\.vision: expected an object with .*mlp"):
        Pi05Config.from_architecture(broken)
    broken = config.architecture()
    broken["vision"]["image_size"] = 50
    with pytest.raises(ValueError, match="multiple"):
        Pi05Config.from_architecture(broken)
