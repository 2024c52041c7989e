"""Requests and replies of ``/v1/actions`` as Python objects. On the wire they are msgpack maps (server/codec.py)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pi05_ros.client.errors import ClientError

LONGEST_MS = 3_600_000.0
"""The longest time that the server lets a request ask for."""


@dataclass(frozen=True)
class Observation:
    """One moment of the robot, in robot units; the server's metadata says which cameras and joints it expects.

    images: by camera name. RGB uint8 [height, width, 3] or [3, height, width], floats 0..1 of that shape, or the bytes
        of a JPEG or PNG file.
    state: [state_dim] numbers. prompt: the instruction, as a person would say it.
    image_masks: by camera name; False means "pretend this camera is absent".
    noise: float [horizon, 32] in model space, where the flow starts; None: the server draws it.
    stamp: seconds in whatever clock the caller uses, and id: text; both are handed back unchanged.
    """

    images: Mapping[str, Any]
    state: Any
    prompt: str
    image_masks: Mapping[str, bool] | None = None
    noise: Any = None
    stamp: float | None = None
    id: str | None = None

    def wire(self) -> dict[str, Any]:
        """As a request's input."""
        observation = {
            "images": {name: _image(image) for name, image in self.images.items()},
            "state": np.asarray(self.state),
            "image_masks": None if self.image_masks is None else dict(self.image_masks),
            "noise": None if self.noise is None else np.asarray(self.noise),
            "stamp": self.stamp,
            "id": self.id,
        }
        return {
            "prompt": self.prompt,
            "observation": {name: value for name, value in observation.items() if value is not None},
        }


@dataclass(frozen=True)
class Actions:
    """An action chunk.

    actions: float32 [horizon, action_dim], robot units; row i is meant for (i + 1) control periods after the
        observation.
    id, stamp: those of the observation. model: name of the checkpoint.
    timings: milliseconds by stage in the engine, total_ms among them; of a batch, the slowest by stage.
    cache_hit: the prefix was not computed, an exactly equal one was at hand; of a batch, all of them.
    server_timing: milliseconds as the websocket has them (infer_ms, prev_total_ms); empty over HTTP.
    reply: all that came, for what is not named here.
    """

    actions: np.ndarray
    id: str | None = None
    stamp: float | None = None
    timings: dict[str, float] = field(default_factory=dict)
    cache_hit: bool = False
    server_timing: dict[str, float] = field(default_factory=dict)
    model: str = ""
    reply: dict[str, Any] = field(default_factory=dict, repr=False)


def _image(image: Any) -> Any:
    return image if isinstance(image, bytes) else np.asarray(image)


def make_request(
    observations: Sequence[Observation],
    *,
    seed: int | None,
    num_steps: int | None,
    prefix_cache: bool | None,
    seconds: float,
) -> dict[str, Any]:
    """seconds: the server is not to begin with it later than that."""
    parameters = {"seed": seed, "num_inference_steps": num_steps}
    runtime = {"prefix_cache": prefix_cache, "timeout_ms": min(seconds * 1e3, LONGEST_MS)}
    inputs = [observation.wire() for observation in observations]
    return {
        "request_id": uuid.uuid4().hex,
        "input": inputs[0] if len(inputs) == 1 else inputs,
        "parameters": {name: value for name, value in parameters.items() if value is not None},
        "runtime": {name: value for name, value in runtime.items() if value is not None},
    }


def read_reply(reply: Mapping[str, Any], request: Mapping[str, Any], count: int) -> list[Actions]:
    """The chunks of an envelope, one for each of the request's count observations, in their order.

    Raises ClientError: it is the answer to another request, or no envelope of so many chunks.
    """
    if reply.get("id") != request["request_id"]:
        raise ClientError(f"reply: expected id {request['request_id']!r}, got {reply.get('id')!r:.80}.")
    try:
        items = sorted(reply["data"], key=lambda item: item["input_index"])
        chunks = [
            Actions(
                actions=np.array(item["action"]["values"], dtype=np.float32),
                id=item.get("id"),
                stamp=item.get("stamp"),
                timings=dict(reply.get("timings") or {}),
                cache_hit=bool(reply["usage"]["prefix_cache_hit"]),
                server_timing=dict(reply.get("server_timing") or {}),
                model=str(reply["model"]),
                reply=dict(reply),
            )
            for item in items
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ClientError(f"reply: expected an action.generation, got something else ({error!r:.200}).") from error
    if [item["input_index"] for item in items] != list(range(count)):
        raise ClientError(f"reply: expected chunks for {count} observations, got {len(items)}.")
    for chunk in chunks:
        if chunk.actions.ndim != 2:
            raise ClientError(f"reply: expected actions [horizon, action_dim], got {list(chunk.actions.shape)}.")
    return chunks
