"""/openapi.json: the HTTP routes, from the models in ``schema.py``."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from pi05_ros import __version__
from pi05_ros.server.errors import CODES
from pi05_ros.server.reply import JSON, MSGPACK
from pi05_ros.server.schema import ErrorReply, GenerationReply, GenerationRequest

_DESCRIPTION = """\
Observations in, action chunks out. The websockets `/v1/actions/realtime` (msgpack; the metadata first, then a reply to
each request, as over HTTP) and `/openpi/policy` or `/` (OpenPI's protocol) are not part of this document.

Errors of every route are `{"error": {"code", "message", "field"}, "detail": message}`."""

_WHAT_WENT_WRONG = {
    400: "A value is not acceptable; `field` names it, the message says what was expected and what came.",
    401: "A token is needed.",
    403: "A web page of another origin may not call this server.",
    408: "The body did not come in time.",
    413: "The body, an image or a list is larger than the server's limits.",
    415: "The body is neither JSON nor msgpack.",
    500: "The inference failed; the log of the server says more.",
    503: "Not ready, or busy: `Retry-After` says when to try again.",
    504: "The request's time had passed before its turn came.",
}

_EXAMPLE = {
    "request_id": "example",
    "input": {
        "prompt": "pick up the cube",
        "observation": {"images": {"cam_high": {"b64_json": "<base64 of a JPEG or PNG file>"}}, "state": [0.0, 0.1]},
    },
    "parameters": {"num_inference_steps": 10},
}


@cache
def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1, plain JSON types."""
    models = [(GenerationRequest, "validation"), (GenerationReply, "serialization"), (ErrorReply, "serialization")]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}}

    def errors(*statuses: int) -> dict[str, Any]:
        return {
            str(status): {"description": f"`{CODES[status]}` {_WHAT_WENT_WRONG[status]}", "content": error}
            for status in statuses
        }

    request = {"$ref": "#/components/schemas/GenerationRequest"}
    reply = {"schema": {"$ref": "#/components/schemas/GenerationReply"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pi05_ros", "version": __version__, "description": _DESCRIPTION},
        "paths": {
            "/v1/actions/generations": {
                "post": {
                    "operationId": "generate_actions",
                    "summary": "Observations in, action chunks out.",
                    "description": "A msgpack body is the same map, in which arrays may be numpy arrays "
                    '(`{"__ndarray__", "data", "dtype", "shape"}`). The reply is msgpack if the request was, or if '
                    '`Accept` says so. `runtime.response_format` "raw" gives `{request_id, actions, ...}` instead. '
                    "A body without `input` is one observation by itself.",
                    "requestBody": {
                        "required": True,
                        "content": {
                            JSON: {"schema": request, "example": _EXAMPLE},
                            MSGPACK: {"schema": {"type": "string", "format": "binary"}},
                        },
                    },
                    "responses": {
                        "200": {
                            "description": "The envelope, or the raw form.",
                            "content": {
                                JSON: {"schema": {"anyOf": [reply["schema"], {"type": "object"}]}},
                                MSGPACK: {"schema": {"type": "string", "format": "binary"}},
                            },
                        },
                        **errors(400, 401, 403, 408, 413, 415, 500, 503, 504),
                    },
                }
            },
            "/v1/actions/metadata": {
                "get": {
                    "operationId": "metadata",
                    "summary": "What the policy is, what it reads and what it gives.",
                    "responses": {
                        "200": {
                            "description": "Names of cameras and joints, sizes, units, defaults, capabilities.",
                            "content": {JSON: {"schema": {"type": "object"}}},
                        },
                        **errors(401, 403, 503),
                    },
                }
            },
            "/healthz": {
                "get": {
                    "operationId": "healthz",
                    "summary": "Whether the server lives.",
                    "responses": {
                        "200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}},
                        **errors(403),
                    },
                }
            },
            "/readyz": {
                "get": {
                    "operationId": "readyz",
                    "summary": "Whether the policy is ready.",
                    "responses": {
                        "200": {"description": "Ready.", "content": {JSON: {"schema": {"type": "object"}}}},
                        **errors(403, 503),
                    },
                }
            },
            "/metrics": {
                "get": {
                    "operationId": "metrics",
                    "summary": "Counters and histograms in Prometheus's text format.",
                    "responses": {
                        "200": {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}},
                        **errors(401, 403),
                    },
                }
            },
        },
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
