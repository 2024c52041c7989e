"""Loading weights: every known variant of names is read, everything wrong is said at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pi05_ros.checkpoint import load_model, make_checkpoint
from pi05_ros.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"
EMBED_TOKENS = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
EXPERT = "paligemma_with_expert.gemma_expert."


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy whose weights a test may replace."""
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def rewrite(checkpoint: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(change(dict(tensors)), checkpoint / "model.safetensors")


def rename(pattern: str, replacement: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(pattern, replacement, key): value for key, value in tensors.items()}


def with_both_embeddings(tensors: Tensors) -> Tensors:
    return {**tensors, EMBED_TOKENS: tensors[EMBEDDING].clone()}


def surplus(tensors: Tensors) -> Tensors:
    return {
        **tensors,
        "state_proj.weight": torch.zeros(64, 32),
        EXPERT + "model.embed_tokens.weight": torch.zeros(4, 64),
        EXPERT + "model.layers.0.input_layernorm.weight": torch.zeros(64),
        EXPERT + "model.norm.weight": torch.zeros(64),
        "proprio_history_proj.weight": torch.zeros(2, 2),
    }


VARIANTS: dict[str, Callable[[Tensors], Tensors]] = {
    "leading model.": rename("^", "model."),
    "other wrapper name": rename("^paligemma_with_expert", "PaligemmaWithExpert"),
    "older transformers": rename(r"paligemma\.model\.", "paligemma."),
    "no vision_model segment": rename(r"vision_tower\.vision_model\.", "vision_tower."),
    "embed_tokens instead of lm_head": rename(re.escape(EMBEDDING), EMBED_TOKENS),
    "lm_head inside model": rename(r"paligemma\.lm_head", "paligemma.model.lm_head"),
    "both embeddings, as re-saved": lambda tensors: rename("^", "model.")(with_both_embeddings(tensors)),
    "action_time_mlp": rename("^time_mlp", "action_time_mlp"),
    "surplus tensors that are known": surplus,
    "without the unused expert lm_head": lambda t: {k: v for k, v in t.items() if k != EXPERT + "lm_head.weight"},
    "bfloat16": lambda tensors: {key: value.bfloat16() for key, value in tensors.items()},
    "float16": lambda tensors: {key: value.half() for key, value in tensors.items()},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_known_variant_is_read(original: Path, checkpoint: Path, variant: str) -> None:
    rewrite(checkpoint, VARIANTS[variant])
    expected, actual = load_model(original).state_dict(), load_model(checkpoint).state_dict()
    exact = variant not in ("bfloat16", "float16")
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert actual[name].dtype == torch.float32
        assert torch.equal(actual[name], value) if exact else torch.allclose(actual[name], value, rtol=1e-2, atol=1e-3)


def test_shards_are_read(original: Path, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    keys = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": keys[:70], "model-00002-of-00002.safetensors": keys[70:]}
    for name, part in shards.items():
        save_file({key: tensors[key] for key in part}, checkpoint / name)
    index = {"weight_map": {key: name for name, part in shards.items() for key in part}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    expected, actual = load_model(original).state_dict(), load_model(checkpoint).state_dict()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())

    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shards that are not there: model-00002"):
        load_model(checkpoint)


def test_a_weight_file_is_a_path_too(original: Path) -> None:
    assert load_model(original / "model.safetensors").config == load_model(original).config


def test_all_that_is_wrong_is_said_at_once(checkpoint: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        del tensors["action_in_proj.weight"]
        tensors["action_out_proj.bias"] = torch.zeros(31)
        tensors["time_mlp_in.bias"] = torch.zeros(64, dtype=torch.int8)
        tensors["paligemma_with_expert.paligemma.model.language_model.layers.3.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["something.else"] = torch.zeros(1)
        return tensors

    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError) as caught:
        load_model(checkpoint)
    message = str(caught.value)
    for part in (
        str(checkpoint),
        "1 missing: action_in_proj.weight",
        "2 unexpected: ",
        "language_model.layers.3.mlp.up_proj.weight",
        "something.else",
        "action_out_proj.bias is [31], expected [32]",
        "time_mlp_in.bias is I8, expected one of F32, F16, BF16, F64",
        "Tried: ",
    ):
        assert part in message


def test_a_single_unknown_tensor_is_an_error(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: {**tensors, "paligemma_with_expert.adapter.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"1 unexpected: paligemma_with_expert\.adapter\.weight"):
        load_model(checkpoint)


def test_every_single_tensor_is_needed(original: Path, checkpoint: Path) -> None:
    keys = [key for key in load_file(original / "model.safetensors") if key != EXPERT + "lm_head.weight"]
    for key in keys[::7]:
        rewrite(checkpoint, lambda tensors, key=key: {k: v for k, v in tensors.items() if k != key})
        with pytest.raises(CheckpointError, match=f"1 missing: {re.escape(key)}"):
            load_model(checkpoint)
        (checkpoint / "model.safetensors").write_bytes((original / "model.safetensors").read_bytes())


@pytest.mark.parametrize("prefix", ["", "model."])
def test_of_two_different_embeddings_the_trained_one_is_read(checkpoint: Path, prefix: str) -> None:
    """LeRobot does not tie them: a fine-tune changes embed_tokens and leaves lm_head behind."""

    def fine_tuned(tensors: Tensors) -> Tensors:
        return {prefix + key: value for key, value in {**tensors, EMBED_TOKENS: tensors[EMBEDDING] + 1}.items()}

    trained = load_file(checkpoint / "model.safetensors")[EMBEDDING] + 1
    rewrite(checkpoint, fine_tuned)
    assert torch.equal(load_model(checkpoint).prefix.embed_tokens.weight, trained)


def test_pi0_is_recognised(checkpoint: Path) -> None:
    def to_pi0(tensors: Tensors) -> Tensors:
        kept = {key: value for key, value in tensors.items() if ".dense." not in key}
        return {**kept, "state_proj.weight": torch.zeros(64, 32)}

    rewrite(checkpoint, to_pi0)
    with pytest.raises(CheckpointError, match="looks like a pi0 checkpoint"):
        load_model(checkpoint)


@pytest.mark.parametrize("damage", ["truncated", "empty", "html"])
def test_damaged_files_are_refused(checkpoint: Path, damage: str) -> None:
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes({"truncated": content[:-1000], "empty": b"", "html": b"<!DOCTYPE html>" * 99}[damage])
    with pytest.raises(CheckpointError, match="not readable as safetensors"):
        load_model(checkpoint)


def test_missing_weights_say_what_was_looked_for(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"looked for model.safetensors and model.safetensors.index.json"):
        load_model(checkpoint)


def test_weights_do_not_depend_on_the_file_any_more(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    before = model.action_in_proj.weight.clone()
    with (checkpoint / "model.safetensors").open("r+b") as file:  # in place: a mapped file would change under us
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\0" * size)
    assert torch.equal(model.action_in_proj.weight, before)


def test_progress_reaches_the_end(original: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(original, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen)
