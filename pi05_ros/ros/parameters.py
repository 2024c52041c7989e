"""Parameters of the policy node: declared, checked and read as the table in ``declarations.py`` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

from pi05_ros.errors import Pi05Error
from pi05_ros.robot.loop import LoopSettings
from pi05_ros.robot.safety import SafetySettings
from pi05_ros.ros.declarations import PARAMETERS
from pi05_ros.server.access import read_token
from pi05_ros.server.sidecar import ServerSettings

_BY_NAME = {spec.name: spec for spec in PARAMETERS}


def declare_parameters(node: Node) -> None:
    """Declare all, with descriptions and ranges. Raises Pi05Error: a value of the wrong type or out of range."""
    for spec in PARAMETERS:
        descriptor = ParameterDescriptor(description=spec.description)
        if spec.choices:
            descriptor.additional_constraints = f"one of: {spec.legal}"
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
            reason = f"{spec.name}: expected one of {spec.legal}, got {parameter.value!r}."
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
