"""Weights from safetensors files into a ``Pi05Model``: strict, and a few tensors at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pi05_ros.checkpoint.layout import canonical, checkpoint_key, is_dropped, is_lm_head, model_name
from pi05_ros.errors import CheckpointError
from pi05_ros.model import Pi05Config, Pi05Model
from pi05_ros.model.precision import parameter_dtype

logger = logging.getLogger(__name__)

READERS = 4
"""Threads that read, so that the page faults of one do not hold up the copies of another."""

_FLOATS = ("F32", "F16", "BF16", "F64")
_SHOWN = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a weight file, not read yet."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files at ``path``: the file itself, model.safetensors, or the shards of an index.

    Raises CheckpointError: there are none.
    """
    if path.is_file():
        return (path,)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: expected an object with a weight_map: {error!r}") from error
        files = tuple(path / name for name in names)
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{index} names shards that are not there: {_listed(absent)}.")
        return files
    single = path / "model.safetensors"
    if single.is_file():
        return (single,)
    raise CheckpointError(
        f"{path}: no weights found; looked for model.safetensors and model.safetensors.index.json"
        + ("." if path.is_dir() else ", and the folder itself does not exist.")
    )


def load_weights(
    model: Pi05Model,
    files: tuple[Path, ...],
    device: torch.device | str,
    precision: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill a model (which may be on the meta device) from safetensors files, each parameter in its precision's dtype.

    progress: called with tensors read so far and in all.
    Raises CheckpointError, before anything is read, that counts and names missing, unexpected, wrongly shaped and
    non-floating tensors; or, while reading, for a file that is damaged.
    """
    with ExitStack() as stack:
        handles = {file: stack.enter_context(_open(file)) for file in files}
        stored = list(_stored_tensors(handles))
        plan = _match(model, stored, files)

        def read(item: tuple[str, StoredTensor]) -> tuple[str, Tensor]:
            name, source = item
            value = _read(handles[source.file], source).to(device, copy=True)
            return name, value.to(parameter_dtype(name, precision))

        pool = stack.enter_context(ThreadPoolExecutor(READERS, "pi05-weights"))
        try:
            for done, (name, value) in enumerate(pool.map(read, plan.items()), 1):
                _set_parameter(model, name, value)
                if progress is not None:
                    progress(done, len(plan))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # what has not begun need not be read any more
            raise
    unused = len(stored) - len(plan)
    logger.info("Read %d tensors from %s; %d more are not used at inference.", len(plan), files[0].parent, unused)


def load_model(
    path: str | Path,
    device: torch.device | str = "cpu",
    precision: str = "float32",
    config: Pi05Config | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pi05Model:
    """The model of a checkpoint folder (or .safetensors file), ready for inference.

    config: sizes; None: those of the config.json beside the weights.
    Raises CheckpointError with everything that is wrong.
    """
    from pi05_ros.checkpoint.description import read_checkpoint

    path = Path(path)
    if config is None:
        config = read_checkpoint(path, with_stats=False).config
    parameter_dtype("", precision)  # an unknown precision should not wait for a long load
    with torch.device("meta"):
        model = Pi05Model(config)
    load_weights(model, weight_files(path), device, precision, progress)
    return model.eval().requires_grad_(False)


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not readable as safetensors (truncated download?): {error}") from error


def _read(handle: Any, source: StoredTensor) -> Tensor:
    try:
        return handle.get_tensor(source.key)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{source.file}: {source.key} cannot be read: {error}") from error


def _stored_tensors(handles: dict[Path, Any]) -> Iterator[StoredTensor]:
    for file, handle in handles.items():
        for key in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
            part = handle.get_slice(key)
            yield StoredTensor(key, file, tuple(part.get_shape()), part.get_dtype())


def _match(model: Pi05Model, stored: list[StoredTensor], files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Parameter name -> the stored tensor that holds it."""
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    plan: dict[str, StoredTensor] = {}
    unexpected, wrong = [], []
    for tensor in stored:
        if is_dropped(tensor.key):
            continue
        name = model_name(tensor.key)
        if name not in expected:
            unexpected.append(tensor.key)
            continue
        # A LeRobot fine-tune has the embedding twice. They part in training, and embed_tokens is the one it uses.
        if name not in plan or not is_lm_head(tensor.key):
            plan[name] = tensor
        if tensor.shape != expected[name]:
            wrong.append(f"{tensor.key} is {list(tensor.shape)}, expected {list(expected[name])}")
        elif tensor.dtype not in _FLOATS:
            wrong.append(f"{tensor.key} is {tensor.dtype}, expected one of {', '.join(_FLOATS)}")
    missing = [name for name in expected if name not in plan]
    if missing or unexpected or wrong:
        raise CheckpointError(_mismatch(missing, unexpected, wrong, stored, files))
    return plan


def _mismatch(
    missing: list[str], unexpected: list[str], wrong: list[str], stored: list[StoredTensor], files: tuple[Path, ...]
) -> str:
    lines = [f"{', '.join(map(str, files))}: the weights do not fit a Pi0.5 of the configured size."]
    if missing:
        lines.append(f"{len(missing)} missing: {_listed([checkpoint_key(name) for name in missing])}")
    if unexpected:
        lines.append(f"{len(unexpected)} unexpected: {_listed(unexpected)}")
    if wrong:
        lines.append(f"{len(wrong)} of the wrong shape or type: {_listed(wrong)}")
    keys = {canonical(tensor.key) for tensor in stored}
    if any(key.startswith("state_proj.") for key in keys) and any(".dense." in name for name in missing):
        lines.append("It has state_proj and no adaptive norms: this looks like a pi0 checkpoint, not pi05.")
    lines.append(
        "Tried: the names of LeRobot and openpi, with and without a leading 'model.', with and without the segments "
        "'.model.' and '.vision_model.', and the token embedding as embed_tokens or lm_head."
    )
    return "\n  ".join(lines)


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _set_parameter(model: Pi05Model, name: str, value: Tensor) -> None:
    module_name, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module_name), attribute, torch.nn.Parameter(value, requires_grad=False))
