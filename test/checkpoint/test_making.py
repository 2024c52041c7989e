"""Random checkpoints are complete, repeatable and cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pi05_ros.checkpoint import load_model, make_checkpoint, random_model
from pi05_ros.checkpoint.making import _shapes
from pi05_ros.errors import CheckpointError
from pi05_ros.model import Pi05Config


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    folders = [make_checkpoint("tiny", tmp_path / str(index), seed=seed) for index, seed in enumerate((7, 7, 8))]
    same, again, other = (load_model(folder).state_dict() for folder in folders)
    assert all(torch.equal(same[name], again[name]) for name in same)
    assert not any(torch.equal(same[name], other[name]) for name in same)


@pytest.mark.parametrize("precision", ["float32", "openpi"])
def test_the_same_weights_without_a_checkpoint(tmp_path: Path, precision: str) -> None:
    made = load_model(make_checkpoint("tiny", tmp_path / "tiny", seed=7), precision=precision).state_dict()
    in_place = random_model(Pi05Config.tiny(), "cpu", precision, seed=7).state_dict()
    assert made.keys() == in_place.keys()
    assert all(made[name].dtype == in_place[name].dtype and torch.equal(made[name], in_place[name]) for name in made)


@pytest.mark.parametrize(("layout", "dtype"), [("lerobot", "F32"), ("openpi", "BF16")])
def test_files_are_as_published(tmp_path: Path, layout: str, dtype: str) -> None:
    folder = make_checkpoint("tiny", tmp_path / "tiny", layout)
    with safe_open(folder / "model.safetensors", "pt") as file:
        keys = list(file.keys())
        assert {file.get_slice(key).get_dtype() for key in keys} == {dtype}
        assert "paligemma_with_expert.paligemma.lm_head.weight" in keys
        assert not any("embed_tokens" in key or key.startswith("model.") for key in keys)
        kept = "paligemma_with_expert.paligemma.lm_head.weight"
        removed = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
        assert file.metadata() == {"format": "pt", removed: kept}
    assert sum(file.stat().st_size for file in folder.rglob("*")) < 40e6


def test_pi05_base_has_the_published_names_and_size() -> None:
    shapes = dict(_shapes(Pi05Config.pi05_base()))
    assert len(shapes) == 812
    assert sum(shape.numel() for _, shape in shapes.values()) == 3_616_757_520


def test_wrong_choices_and_existing_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="preset: expected one of tiny, pi05_base, got 'huge'"):
        make_checkpoint("huge", tmp_path)
    make_checkpoint("tiny", tmp_path)
    with pytest.raises(CheckpointError, match="already"):
        make_checkpoint("tiny", tmp_path)
    make_checkpoint("tiny", tmp_path, overwrite=True)
    assert not list(tmp_path.glob("*.partial"))


def test_a_sharded_checkpoint_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match=r"holds model\.safetensors\.index\.json already"):
        make_checkpoint("tiny", tmp_path)
    load_model(make_checkpoint("tiny", tmp_path, overwrite=True))


def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pi05_ros.tools.make_checkpoint", "--output", str(tmp_path / "made")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    assert "random weights (tiny, lerobot layout, seed 0)" in made.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1
    assert again.stderr.startswith("make_checkpoint: ")
    assert "already" in again.stderr
    assert "--force" in again.stderr
    assert "Traceback" not in again.stderr
