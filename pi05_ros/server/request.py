"""A request's body -> observations and options, for every form in which clients of either protocol write them."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pi05_ros.errors import ObservationError
from pi05_ros.policy import Observation, Policy
from pi05_ros.server.codec import unpack
from pi05_ros.server.errors import RequestError, shown
from pi05_ros.server.limits import Limits
from pi05_ros.server.schema import GenerationRequest, Input, Parameters, read_request
from pi05_ros.server.values import ImageReader, as_array, is_unicode, plain

_OBSERVATION_KEYS = ("observation.images.", "observation/images/", "observation.", "observation/")
_RENAMED = {
    "tokenized_prompt": "tokens",
    "tokenized_prompt_mask": "token_mask",
    "token_masks": "token_mask",
    "task": "prompt",
    "timestamp": "stamp",
}
_FIELDS = ("state", "noise", "prompt", "image_masks", "camera_order", "tokens", "token_mask", "stamp", "id")
_TOP_LEVEL_PARAMETERS = ("num_inference_steps", "action_horizon", "action_dim", "seed")
_TOP_LEVEL_RUNTIME = {
    "output_format": "output_format",
    "response_format": "response_format",
    "return_timing": "return_timing",
    "timeout_ms": "timeout_ms",
    "enable_prefix_cache": "prefix_cache",
    "enable_cuda_graph": "cuda_graph",
}


@dataclass(frozen=True)
class ActionRequest:
    """What is asked of the policy, and how the answer is to look.

    noises: by observation, float [horizon, 32], [1, horizon, 32] or None.
    """

    id: str
    observations: tuple[Observation, ...]
    noises: tuple[np.ndarray | None, ...]
    seed: int | None
    num_steps: int | None
    prefix_cache: bool | None
    graphs: bool | None
    deadline: float
    numpy: bool
    raw: bool
    timing: bool

    def options(self, index: int) -> dict[str, Any]:
        """Of ``Policy.submit``, for one of the observations."""
        return {
            "noise": self.noises[index],
            "seed": self.seed,
            "num_steps": self.num_steps,
            "prefix_cache": self.prefix_cache,
            "graphs": self.graphs,
            "deadline": self.deadline,
        }


def read_body(data: bytes, msgpack: bool, limits: Limits) -> dict[Any, Any]:
    """A JSON or msgpack map. Raises ObservationError, RequestError (413)."""
    if msgpack:
        body = unpack(data, limits.values)
    else:
        # Each value needs one of these characters, so this bounds what the parser may make of few bytes.
        if sum(data.count(mark) for mark in (b",", b"[", b"{")) > limits.values:
            raise RequestError(413, f"request: expected {limits.values} values at most, got more", "request")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ObservationError("request", f"expected JSON: {error or type(error).__name__}") from error
    if not isinstance(body, dict):
        raise ObservationError("request", f"expected a map, got {type(body).__name__}")
    return body


def read_action_request(body: dict[Any, Any], policy: Policy, limits: Limits, numpy: bool) -> ActionRequest:
    """numpy: the default form of the actions. Raises ObservationError, RequestError."""
    if "input" not in body:
        body = _from_flat(body)
    elif "return_timing" in body and isinstance(body.get("runtime", {}), Mapping):
        body = {**body, "runtime": {"return_timing": body["return_timing"], **body.get("runtime", {})}}
    given = body["input"]  # its length first: each element that is wrong costs as much as one that is right
    if isinstance(given, list) and not 1 <= len(given) <= limits.inputs:
        raise ObservationError("input", f"expected 1 to {limits.inputs} observations, got {len(given)}")
    request = read_request(body)
    _check_sizes(request.parameters, policy)
    inputs = request.input if isinstance(request.input, list) else [request.input]
    reader = ImageReader(limits)
    read = [
        _read_input("input" if request.input is one else f"input.{index}", one, policy, reader)
        for index, one in enumerate(inputs)
    ]
    return _action_request(request, read, limits, numpy)


def read_openpi(body: dict[Any, Any], policy: Policy, limits: Limits) -> ActionRequest:
    """A flat observation of openpi's clients. Raises ObservationError, RequestError."""
    return read_action_request(_from_flat(body), policy, limits, numpy=True)


def _action_request(
    request: GenerationRequest, read: list[tuple[Observation, np.ndarray | None]], limits: Limits, numpy: bool
) -> ActionRequest:
    parameters, runtime = request.parameters, request.runtime
    form = runtime.output_format or parameters.output_format
    seconds = limits.request_seconds
    if runtime.timeout_ms is not None:
        seconds = min(runtime.timeout_ms / 1e3, seconds)
    return ActionRequest(
        id=request.id or request.request_id or f"act_{uuid.uuid4().hex}",
        observations=tuple(observation for observation, _ in read),
        noises=tuple(noise for _, noise in read),
        seed=parameters.seed,
        num_steps=parameters.num_inference_steps,
        prefix_cache=runtime.prefix_cache,
        graphs=runtime.cuda_graph,
        deadline=time.monotonic() + seconds,
        numpy=numpy if form is None else form == "numpy",
        raw=runtime.response_format == "raw",
        timing=runtime.return_timing is not False,
    )


def _from_flat(body: Mapping[Any, Any]) -> dict[Any, Any]:
    """A body that is one observation, with its options beside it."""
    runtime = {name: body[key] for key, name in _TOP_LEVEL_RUNTIME.items() if key in body}
    given = body.get("runtime")
    return {
        "request_id": body.get("request_id"),
        "input": {"observation": body},
        "parameters": body.get(
            "parameters", {name: body[name] for name in _TOP_LEVEL_PARAMETERS if body.get(name) is not None}
        ),
        "runtime": {**runtime, **given} if isinstance(given, Mapping) else runtime if given is None else given,
    }


def _check_sizes(parameters: Parameters, policy: Policy) -> None:
    """The size of a chunk is the checkpoint's; whoever asks for another one would get something else than he thinks."""
    config = policy.checkpoint.config
    for name, given, possible in (
        ("action_horizon", parameters.action_horizon, (config.horizon,)),
        ("action_dim", parameters.action_dim, (config.action_dim, policy.binding.action_dim)),
    ):
        if given is not None and given not in possible:
            wanted = " or ".join(str(one) for one in sorted(set(possible)))
            raise ObservationError(f"parameters.{name}", f"expected {wanted} (this checkpoint's), got {given}")


def _read_input(field: str, given: Input, policy: Policy, reader: ImageReader) -> tuple[Observation, np.ndarray | None]:
    observation = {} if given.observation is None else given.observation
    if not isinstance(observation, Mapping):
        raise ObservationError(f"{field}.observation", f"expected a map, got {type(observation).__name__}")
    images, values = _sorted_keys(observation, policy)
    if given.images is not None:
        if not isinstance(given.images, Mapping):
            raise ObservationError(
                f"{field}.images", f"expected a map by camera name, got {type(given.images).__name__}"
            )
        images = dict(_cameras(given.images, policy))
    values |= {
        name: value
        for name, value in (("state", given.state), ("noise", given.noise), ("prompt", given.task or given.prompt))
        if value is not None
    }
    _check_camera_order(values.get("camera_order"), policy, images)
    masks = values.get("image_masks")
    return (
        Observation(
            images={name: reader.read(f"images.{name}", value) for name, value in images.items()},
            state=as_array("state", values["state"]) if "state" in values else _missing("state", policy),
            prompt=_prompt(values, reader.limits),
            image_masks=_masks(masks, policy),
            tokens=_optional_array("tokens", values),
            token_mask=_optional_array("token_mask", values),
            stamp=_stamp(values.get("stamp")),
            id=_identity(values.get("id")),
        ),
        _optional_array("noise", values),
    )


def _sorted_keys(observation: Mapping[Any, Any], policy: Policy) -> tuple[dict[str, Any], dict[str, Any]]:
    """Images by camera, and everything else by field; the keys may be nested or flat, with dots or slashes."""
    images: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, value in observation.items():
        if not isinstance(key, str):
            continue  # unknown fields are ignored
        name = next((key.removeprefix(start) for start in _OBSERVATION_KEYS if key.startswith(start)), key)
        name = _RENAMED.get(name, name)
        if name in ("images", "image") and isinstance(value, Mapping) and not _is_described(value):
            images |= dict(_cameras(value, policy))
        elif (camera := _camera(name, policy)) is not None:
            images[camera] = value
        elif name == "images" and value is not None:
            raise ObservationError("images", f"expected a map by camera name, got {shown(value)}")
        elif name in (*_FIELDS, "joint_position", "gripper_position") and value is not None:
            values[name] = value
        elif key.startswith(("observation.images.", "observation/images/")):
            images[name] = value  # refused by name later
    if "state" not in values and "joint_position" in values:
        parts = [as_array(name, values[name]) for name in ("joint_position", "gripper_position") if name in values]
        if any(part.ndim > 1 for part in parts):
            raise ObservationError("joint_position", "expected a vector of numbers")
        values["state"] = np.concatenate([np.atleast_1d(part) for part in parts])
    return images, values


def _is_described(value: Mapping[Any, Any]) -> bool:
    return any(key in value for key in ("b64_json", "base64", "values"))


def _cameras(images: Mapping[Any, Any], policy: Policy) -> Iterator[tuple[str, Any]]:
    for key, value in images.items():
        if not isinstance(key, str):
            raise ObservationError("images", f"expected names of cameras, got {shown(key)}")
        if value is not None:
            yield _camera(key, policy) or key, value


def _camera(name: str, policy: Policy) -> str | None:
    """The policy's own name of a camera, which a client may give with or without the prefix of data sets."""
    known = (*policy.binding.fed_cameras, *policy.binding.ignored_cameras)
    for one in (name, f"observation.images.{name}", name.removeprefix("observation.images.")):
        if one in known:
            return one
    return None


def _check_camera_order(order: Any, policy: Policy, images: Mapping[str, Any]) -> None:
    """The order of the cameras is the checkpoint's. It may be said, but not changed."""
    if order is None:
        return
    if not isinstance(order, (list, tuple)) or not all(isinstance(name, str) for name in order):
        raise ObservationError("camera_order", f"expected a list of camera names, got {shown(order)}")
    wanted = [name for name in policy.binding.fed_cameras if name in images]
    if [_camera(name, policy) or name for name in order] != wanted:
        raise ObservationError("camera_order", f"expected {wanted} (this checkpoint's), got {list(order)!r:.200}")


def _masks(masks: Any, policy: Policy) -> dict[str, Any] | None:
    if masks is None:
        return None
    if not isinstance(masks, Mapping):
        raise ObservationError("image_masks", f"expected a map by camera name, got {type(masks).__name__}")
    read = {}
    for key, value in masks.items():
        name = (_camera(key, policy) or key) if isinstance(key, str) else shown(key)
        read[name] = plain(value)
        if not isinstance(read[name], bool):
            raise ObservationError(f"image_masks.{name}", f"expected true or false, got {shown(value)}")
    return read


def _prompt(values: Mapping[str, Any], limits: Limits) -> str:
    prompt = plain(values.get("prompt", ""))
    if not isinstance(prompt, str):
        raise ObservationError("prompt", f"expected text, got {type(prompt).__name__}")
    if len(prompt) > limits.prompt:
        raise RequestError(413, f"prompt: expected {limits.prompt} characters at most, got {len(prompt)}", "prompt")
    if not prompt.strip() and "tokens" not in values:
        raise ObservationError("prompt", "is required: the instruction, as a person would say it")
    return prompt


def _optional_array(name: str, values: Mapping[str, Any]) -> np.ndarray | None:
    return as_array(name, values[name]) if values.get(name) is not None else None


def _missing(name: str, policy: Policy) -> Any:
    names = ", ".join(policy.binding.state_names[:3])
    raise ObservationError(name, f"is required: {policy.binding.state_dim} numbers ({names}, ...)")


def _stamp(stamp: Any) -> float | None:
    stamp = plain(stamp)
    if stamp is None:
        return None
    if isinstance(stamp, bool) or not isinstance(stamp, (int, float)) or not math.isfinite(stamp):
        raise ObservationError("stamp", f"expected seconds, got {shown(stamp)}")
    return float(stamp)


def _identity(identity: Any) -> str | None:
    identity = plain(identity)
    if identity is None:
        return None
    if not isinstance(identity, (str, int)) or len(str(identity)) > 256 or not is_unicode(str(identity)):
        raise ObservationError("id", f"expected text of at most 256 characters, got {shown(identity)}")
    return str(identity)
