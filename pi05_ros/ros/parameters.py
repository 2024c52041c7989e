"""Parameters of the policy node: one table, from which they are declared, checked, read and documented."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

from pi05_ros.errors import Pi05Error
from pi05_ros.robot.execution import STRATEGIES
from pi05_ros.robot.loop import LoopSettings
from pi05_ros.robot.safety import SafetySettings
from pi05_ros.server.access import read_token
from pi05_ros.server.sidecar import ServerSettings


@dataclass(frozen=True)
class Spec:
    """A parameter: default, what it means, and what it may be.

    choices: legal values. low, high: bounds of a number. running: may be changed after configure.
    """

    name: str
    default: Any
    description: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    running: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        return (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)


PARAMETERS = (
    Spec("checkpoint", "", "Folder (or .safetensors file) of a checkpoint in LeRobot or openpi layout."),
    Spec("robot", "aloha_ros2", "Robot profile: a name in config/robots or the path of a YAML file."),
    Spec("prompt", "", "The instruction. ~/prompt replaces it; while there is none, the node waits.", running=True),
    Spec("device", "auto", "auto (CUDA if there is a GPU), cuda, cuda:<index> or cpu."),
    Spec(
        "precision",
        "openpi",
        "Of weights and activations. fp8: as openpi, MLPs of the prefix in float8 (GPUs of 8.9 or more).",
        choices=("openpi", "float32", "bfloat16", "fp8"),
    ),
    Spec(
        "compile_mode",
        "graphs",
        "How the network is run. graphs: kernels in captured CUDA graphs (on a CPU: as eager); eager: the same, not "
        "captured; plain: the readable reference.",
        choices=("graphs", "eager", "plain"),
    ),
    Spec("num_steps", 0, "Denoise steps of a chunk; 0: as the checkpoint says (10).", low=0, high=1000),
    Spec("seed", -1, "Seed of every chunk's noise, to repeat a run; -1: fresh noise each time.", low=-1, high=2**62),
    Spec("prefix_cache", 8, "Prefixes that are kept; 0: none.", low=0, high=1024),
    Spec(
        "adapt_to_pi",
        "",
        "Flip joints and convert grippers to pi's convention (ALOHA): true or false; empty: as the profile says. "
        "An openpi checkpoint on an ALOHA needs it said.",
        choices=("", "true", "false"),
    ),
    Spec("tokenizer", "", "Tokenizer file; empty: the one in the checkpoint folder."),
    Spec("norm_stats", "", "File of normalisation statistics; empty: the checkpoint's."),
    Spec("normalization", "", "none: leave states and actions as they are.", choices=("", "none")),
    Spec("resize", "", "Image resizing; empty: as the checkpoint's layout is.", choices=("", "lerobot", "openpi")),
    Spec(
        "time_grid",
        "",
        "Flow times; empty: as the checkpoint's layout is.",
        choices=("", "lerobot", "openpi", "sglang"),
    ),
    Spec(
        "strategy",
        "receding",
        "How one chunk follows another. receding: the new one takes over; ensemble: what overlaps is averaged; rtc: "
        "the new one takes over and is guided to begin as the old one goes on (real-time chunking).",
        choices=STRATEGIES,
    ),
    Spec(
        "replan_steps",
        25,
        "Rows of a chunk that are played before the next one is asked for; fewer where it would else come too late.",
        low=1,
        high=1000,
    ),
    Spec(
        "ensemble_decay",
        0.01,
        "(ensemble) m of the weights exp(-m i) of chunks that overlap, i = 0 the oldest; 0: all count the same.",
        low=0.0,
        high=10.0,
    ),
    Spec(
        "execution_horizon",
        10,
        "(rtc) Rows of a chunk until the pull to the previous one has faded out; those that pass during inference are "
        "fixed, and it is twice as many at least.",
        low=1,
        high=1000,
    ),
    Spec("max_ahead", 0.2, "Seconds of a chunk that are sent ahead in one trajectory.", low=0.01, high=2.0),
    Spec("dry_run", False, "true: infer, publish, limit and count as ever, and command nothing."),
    Spec(
        "max_start_error",
        0.0,
        "Radians between the measured pose and the first target of a motion, beyond which it does not begin; 0: as the "
        "profile says.",
        low=0.0,
        high=6.28,
    ),
    Spec("late_after", 1.0, "Seconds after the last row of a chunk until a late one is held for.", low=0.1, high=60.0),
    Spec("http_host", "127.0.0.1", "Address that the HTTP server listens on; 0.0.0.0: on every IPv4 interface."),
    Spec(
        "http_port", 8000, "Port of the HTTP server: status page, action API, websockets; 0: none.", low=0, high=65535
    ),
    Spec("http_origins", "", "Web pages that may call the HTTP server besides its own: origins, comma separated."),
    Spec(
        "http_token_file",
        "",
        "File with the token that HTTP clients must send; empty: as the environment variable PI05_ROS_TOKEN says, "
        "else none.",
    ),
    Spec("http_certificate", "", "PEM file of the HTTP server's certificate: TLS, together with http_key."),
    Spec("http_key", "", "PEM file of the certificate's private key."),
)
_BY_NAME = {spec.name: spec for spec in PARAMETERS}


def declare_parameters(node: Node) -> None:
    """Declare all, with descriptions and ranges. Raises Pi05Error: a value of the wrong type or out of range."""
    for spec in PARAMETERS:
        descriptor = ParameterDescriptor(description=spec.description)
        if spec.choices:
            descriptor.additional_constraints = "one of: " + ", ".join(choice or "(empty)" for choice in spec.choices)
        # A YAML file or a launch argument may write true where a text is meant, and 1 where a double is: both are taken
        # as what is meant, and check_parameters looks at the type instead of rclpy.
        descriptor.dynamic_typing = isinstance(spec.default, (str, float))
        if spec.low is not None and spec.high is not None:
            if isinstance(spec.default, int):
                descriptor.integer_range = [IntegerRange(from_value=int(spec.low), to_value=int(spec.high), step=1)]
            else:
                descriptor.floating_point_range = [
                    FloatingPointRange(from_value=spec.low, to_value=spec.high, step=0.0)
                ]
        try:
            node.declare_parameter(spec.name, spec.default, descriptor)
        except Exception as error:  # rclpy's own types differ between distributions
            raise Pi05Error(f"Parameter {spec.name} (default {spec.default!r}): {error}") from error
    problem = check_parameters(node.get_parameters(list(_BY_NAME)), configured=False).reason
    if problem:
        raise Pi05Error(problem)


def check_parameters(parameters: Sequence[Parameter], configured: bool) -> SetParametersResult:
    """The answer to a change of parameters: a reason for each that is refused."""
    for parameter in parameters:
        spec = _BY_NAME.get(parameter.name)
        if spec is None:
            continue
        if parameter.type_ == Parameter.Type.NOT_SET:
            return SetParametersResult(successful=False, reason=f"{spec.name} cannot be deleted.")
        if configured and not spec.running:
            reason = f"{spec.name} is read when the node is configured; clean it up first, then set it and configure."
            return SetParametersResult(successful=False, reason=reason)
        if isinstance(spec.default, str) and _text(parameter.value) not in (spec.choices or (_text(parameter.value),)):
            allowed = ", ".join(choice or "(empty)" for choice in spec.choices)
            reason = f"{spec.name}: expected one of {allowed}, got {parameter.value!r}."
            return SetParametersResult(successful=False, reason=reason)
        if isinstance(spec.default, float) and not _is_number(parameter.value, *spec.bounds):
            low, high = spec.bounds
            reason = f"{spec.name}: expected a number from {low:g} to {high:g}, got {parameter.value!r}."
            return SetParametersResult(successful=False, reason=reason)
    return SetParametersResult(successful=True)


def _is_number(value: Any, low: float, high: float) -> bool:
    """True for an integer too: where a double is declared, rclpy would let one of any size pass."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class PolicyParameters:
    """The present values, as what they are for. Raises Pi05Error: the token file cannot be used."""

    def __init__(self, node: Node) -> None:
        values = {spec.name: node.get_parameter(spec.name).value for spec in PARAMETERS}
        values.update({spec.name: float(values[spec.name]) for spec in PARAMETERS if isinstance(spec.default, float)})
        text = {spec.name: _text(values[spec.name]) for spec in PARAMETERS if isinstance(spec.default, str)}
        self.checkpoint, self.robot, self.prompt = text["checkpoint"], text["robot"], text["prompt"]
        self.device, self.precision = text["device"], text["precision"]
        self.dry_run: bool = values["dry_run"]
        self.policy_options: dict[str, Any] = {
            "compile_mode": text["compile_mode"],
            "prefix_cache": values["prefix_cache"],
            "adapt_to_pi": {"": None, "true": True, "false": False}[text["adapt_to_pi"]],
            **{
                name: text[name] or None for name in ("tokenizer", "norm_stats", "normalization", "resize", "time_grid")
            },
        }
        self.loop = LoopSettings(
            strategy=text["strategy"],
            ensemble_decay=values["ensemble_decay"],
            execution_horizon=values["execution_horizon"],
            replan_steps=values["replan_steps"],
            max_ahead=values["max_ahead"],
            safety=SafetySettings(
                max_start_error=values["max_start_error"] or None,
                late_after=values["late_after"],
            ),
            num_steps=values["num_steps"] or None,
            seed=None if values["seed"] < 0 else values["seed"],
        )
        self.server = _server_settings(text, values["http_port"])


def _server_settings(text: dict[str, str], port: int) -> ServerSettings | None:
    """None: nothing is served."""
    if port == 0:
        return None
    origins = (origin.strip() for origin in text["http_origins"].split(","))
    return ServerSettings(
        host=text["http_host"],
        port=port,
        token=read_token(text["http_token_file"], "http_token_file"),
        origins=tuple(origin for origin in origins if origin),
        certificate=text["http_certificate"],
        key=text["http_key"],
    )
