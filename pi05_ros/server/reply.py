"""Action chunks -> the maps that clients of either protocol read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pi05_ros.policy import ActionChunk, Policy
from pi05_ros.server.codec import pack
from pi05_ros.server.request import ActionRequest

JSON, MSGPACK = "application/json", "application/msgpack"

# Ours -> the action API's; what is named alike stays.
_STAGES = {"denoise_ms": "action_denoise_ms"}


def pack_reply(reply: dict[str, Any], msgpack: bool) -> bytes:
    """As msgpack, or as JSON, in which an array is a nested list."""
    if msgpack:
        return pack(reply)
    return json.dumps(reply, default=lambda array: array.tolist(), allow_nan=False, separators=(",", ":")).encode()


def action_reply(request: ActionRequest, chunks: Sequence[ActionChunk], policy: Policy) -> dict[str, Any]:
    """The envelope, or the raw form, of one request's chunks."""
    return _raw(request, chunks, policy) if request.raw else _envelope(request, chunks, policy)


def openpi_reply(request: ActionRequest, chunk: ActionChunk, policy: Policy) -> dict[str, Any]:
    """What openpi's clients read, ``server_timing`` aside. Its only array is the actions: they slice every array."""
    timings = chunk.timings
    infer_ms = sum(timings[stage] for stage in ("preprocess_ms", "cache_lookup_ms", "prefix_ms", "denoise_ms"))
    raw = _raw(request, [chunk], policy)
    return {**raw, "actions": chunk.actions, "policy_timing": {"infer_ms": infer_ms}}


def _envelope(request: ActionRequest, chunks: Sequence[ActionChunk], policy: Policy) -> dict[str, Any]:
    first = chunks[0]
    horizon, dims = first.actions.shape
    reply: dict[str, Any] = {
        "id": request.id,
        "object": "action.generation",
        "created": int(time.time()),
        "model": policy.checkpoint.folder.name,
        "data": [
            {
                "index": index,
                "input_index": index,
                "candidate_index": 0,
                "action": {
                    "type": "continuous",
                    "dtype": "float32",
                    "shape": list(chunk.actions.shape),
                    "values": _actions(request, chunk),
                },
                **_own(chunk),
            }
            for index, chunk in enumerate(chunks)
        ],
        "usage": {
            "batch_size": len(chunks),
            "action_horizon": horizon,
            "action_dim": dims,
            "denoise_steps": first.num_steps,
            "prefix_cache_hit": all(chunk.prefix_cache_hit for chunk in chunks),
        },
    }
    if request.timing:
        reply["timings"] = _timings(chunks)
        reply["cache"] = _cache(request, chunks, policy)
    return reply


def _raw(request: ActionRequest, chunks: Sequence[ActionChunk], policy: Policy) -> dict[str, Any]:
    actions = [_actions(request, chunk) for chunk in chunks]
    reply = {
        "request_id": request.id,
        "actions": actions[0] if len(actions) == 1 else actions,
        "parameters": {"num_inference_steps": chunks[0].num_steps},
        **(_own(chunks[0]) if len(chunks) == 1 else {}),
    }
    if request.timing:
        reply["timings"] = _timings(chunks)
        reply["cache"] = _cache(request, chunks, policy)
    return reply


def _actions(request: ActionRequest, chunk: ActionChunk) -> np.ndarray | list[list[float]]:
    return chunk.actions if request.numpy else chunk.actions.tolist()


def _own(chunk: ActionChunk) -> dict[str, Any]:
    """The observation's own stamp and id, where it had them."""
    return {name: value for name, value in (("stamp", chunk.stamp), ("id", chunk.id)) if value is not None}


def _timings(chunks: Sequence[ActionChunk]) -> dict[str, float]:
    """Milliseconds, of the slowest of them by stage. A prefix from the cache took no time, and has no entry."""
    stages = {_STAGES.get(stage, stage): max(chunk.timings[stage] for chunk in chunks) for stage in chunks[0].timings}
    if all(chunk.prefix_cache_hit for chunk in chunks):
        stages.pop("prefix_ms", None)
    return stages


def _cache(request: ActionRequest, chunks: Sequence[ActionChunk], policy: Policy) -> dict[str, Any]:
    exact = policy.engine.path.cache.entries > 0 and request.prefix_cache is not False
    return {
        "hit": all(chunk.prefix_cache_hit for chunk in chunks),
        "scope": "global" if exact else "request",
        "mode": "exact" if exact else "disabled",
        "grouped": any(chunk.batch_size > 1 for chunk in chunks),
        "batch_size": max(chunk.batch_size for chunk in chunks),
    }
