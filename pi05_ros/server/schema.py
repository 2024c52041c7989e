"""The requests and replies of the action API as pydantic models: what is checked, and what /openapi.json shows.

Fields that hold arrays or images take so many forms that they are read by ``values.py``; here they are ``Any``, with a
description. Unknown fields are ignored, so that clients of other servers may send theirs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from pi05_ros.errors import ObservationError
from pi05_ros.server.errors import shown
from pi05_ros.server.values import is_unicode, plain

MAX_STEPS = 1000
_SWITCH_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "auto": None}


def _switch(value: Any) -> Any:
    """True, False, or None for "auto"; some clients send them as words."""
    value = plain(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word not in _SWITCH_WORDS:
            raise ValueError('expected true, false or "auto"')
        return _SWITCH_WORDS[word]
    if value is not None and not isinstance(value, bool):
        raise ValueError('expected true, false or "auto"')
    return value


def _unwrap(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, bool):
        raise ValueError("expected a number, not a truth value")
    return value


def _integer(value: Any) -> Any:
    """JSON has one kind of number: 1.0 is an integer there."""
    value = _unwrap(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, str) and not is_unicode(value):
        raise ValueError("expected text that is valid Unicode")
    return value


Switch = Annotated[
    bool | None,
    BeforeValidator(_switch),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": ["auto", "true", "false"]}, {"type": "null"}]}),
]
# Bounds stand before the validators, or JSON schema would not show them.
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS), BeforeValidator(_integer)]
Size = Annotated[int, Field(ge=1), BeforeValidator(_integer)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), BeforeValidator(_integer)]
Milliseconds = Annotated[float, Field(gt=0, le=3_600_000), BeforeValidator(_unwrap)]
Text = Annotated[str, BeforeValidator(_text)]
Identity = Annotated[str, Field(max_length=256), BeforeValidator(_text)]

_ARRAY = {
    "description": "Numbers: a nested list, a msgpack array, or {values | data, dtype, shape}.",
    "anyOf": [{"type": "array", "items": {}}, {"type": "object"}],
}
_IMAGE = {
    "description": "RGB, [height, width, 3] or [3, height, width]: uint8 0..255, floats 0..1; a nested list, a "
    "msgpack array, {values | data, dtype, shape}, {b64_json: text} of a JPEG or PNG file, its base64 text, or "
    "(msgpack) bytes.",
    "anyOf": [{"type": "array", "items": {}}, {"type": "object"}, {"type": "string"}],
}
Array = Annotated[Any, WithJsonSchema(_ARRAY)]
Images = Annotated[
    Any,
    WithJsonSchema({"type": "object", "description": "By camera name.", "additionalProperties": _IMAGE}),
]
ObservationMap = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "description": "What the robot sees: images {camera: image}, state, prompt; optional noise, image_masks "
            "{camera: bool}, camera_order, tokens and token_masks, stamp and id (handed back). Flat keys "
            "(observation.images.CAMERA, observation/state ...) are read as well.",
            "properties": {"images": {"type": "object", "additionalProperties": _IMAGE}, "state": _ARRAY},
        }
    ),
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class Input(_Model):
    """One observation; what stands here counts before what stands in ``observation``."""

    task: Text | None = Field(default=None, description="The instruction; counts before prompt.")
    prompt: Text | None = Field(default=None, description="The instruction.")
    observation: ObservationMap = None
    images: Images = None
    state: Array = None
    noise: Array = None


class Parameters(_Model):
    num_inference_steps: Steps | None = Field(default=None, description="Default: the checkpoint's.")
    action_horizon: Size | None = Field(default=None, description="Only the checkpoint's own value.")
    action_dim: Size | None = Field(default=None, description="Only the checkpoint's own value.")
    seed: Seed | None = Field(default=None, description="Of the noise, the same for every input; default: fresh noise.")
    output_format: Literal["list", "numpy"] | None = None


class Runtime(_Model):
    output_format: Literal["list", "numpy"] | None = Field(
        default=None, description="Default: list in JSON, numpy in msgpack."
    )
    response_format: Literal["envelope", "raw"] = "envelope"
    return_timing: Switch = True
    prefix_cache: Switch = None
    cuda_graph: Switch = None
    timeout_ms: Milliseconds | None = Field(
        default=None, description="Not begun by then, it is refused (504). Default: the server's limit."
    )


class GenerationRequest(_Model):
    """``POST /v1/actions/generations``. Without ``input`` the whole body is one observation."""

    model: Text | None = Field(default=None, description="Not read: the server has one policy.")
    id: Identity | None = Field(default=None, description="Handed back; default: made up.")
    request_id: Identity | None = Field(default=None, description="The same under another name.")
    input: Input | list[Input]
    parameters: Parameters = Parameters()
    runtime: Runtime = Runtime()


class Action(BaseModel):
    type: Literal["continuous"]
    dtype: Literal["float32"]
    shape: list[int]
    values: Any = Field(description="[horizon, action_dim] in robot units: a nested list or a msgpack array.")


class ActionItem(BaseModel):
    index: int
    input_index: int
    candidate_index: int
    action: Action


class Usage(BaseModel):
    batch_size: int
    action_horizon: int
    action_dim: int
    denoise_steps: int
    prefix_cache_hit: bool


class GenerationReply(BaseModel):
    """The envelope."""

    id: str
    object: Literal["action.generation"]
    created: int
    model: str
    data: list[ActionItem]
    usage: Usage
    timings: dict[str, float] | None = Field(default=None, description="Milliseconds by stage.")
    cache: dict[str, Any] | None = None


class ErrorDetail(BaseModel):
    code: str
    message: str
    field: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail
    detail: str = Field(description="The message once more, where clients of other servers look for it.")
    status: str | None = Field(
        default=None, description="503 before the policy is ready: loading, warming_up, error, closed."
    )


def read_request(body: dict[Any, Any]) -> GenerationRequest:
    """Raises ObservationError that names the field, what was expected and what came."""
    try:
        return GenerationRequest.model_validate(body)
    except ValidationError as error:
        # Of input's two forms, what is wrong with the one that came.
        other = ("input", "Input" if isinstance(body.get("input"), list) else "list[Input]")
        first = next(one for one in error.errors(include_url=False) if one["loc"][:2] != other)
        field = ".".join(str(part) for part in first["loc"] if part not in ("Input", "list[Input]"))
        message = "a map" if first["type"] == "model_type" else first["msg"]
        for start in ("Value error, ", "Input should be ", "String should have "):
            message = message.removeprefix(start)
        message = message if message.startswith("expected") else f"expected {message}"
        raise ObservationError(field, f"{message}, got {shown(first.get('input'))}") from error
