"""Parameters as a YAML file or a command line writes them, on a real node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import rclpy
from rclpy.context import Context
from rclpy.node import Node
from rclpy.parameter import Parameter

from pi05_ros.errors import Pi05Error
from pi05_ros.ros.parameters import PARAMETERS, PolicyParameters, declare_parameters


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context()
    rclpy.init(context=context, domain_id=int(os.environ["ROS_DOMAIN_ID"]))
    yield context
    rclpy.shutdown(context=context)


@pytest.fixture
def declare(context: Context) -> Iterator[Any]:
    nodes: list[Node] = []

    def begin(**values: Any) -> Node:
        overrides = [Parameter(name, value=value) for name, value in values.items()]
        nodes.append(Node(f"parameters_{len(nodes)}", context=context, parameter_overrides=overrides))
        declare_parameters(nodes[-1])
        return nodes[-1]

    yield begin
    for node in nodes:
        node.destroy_node()


DOUBLES = [spec for spec in PARAMETERS if isinstance(spec.default, float)]


def test_where_a_double_is_meant_an_integer_is_one(declare: Any) -> None:
    ahead = PolicyParameters(declare(max_ahead=1)).loop.max_ahead
    assert (ahead, type(ahead)) == (1.0, float)


@pytest.mark.parametrize("wrong", [7, -1, True, "soon", 7.5, float("nan")])
def test_what_is_no_number_or_out_of_range_is_refused_by_name(declare: Any, wrong: Any) -> None:
    with pytest.raises(Pi05Error, match="max_ahead"):
        declare(max_ahead=wrong)


def test_every_double_has_bounds_that_its_default_is_in(declare: Any) -> None:
    node = declare()
    for spec in DOUBLES:
        (described,) = node.describe_parameters([spec.name])
        bounds = described.floating_point_range[0]
        assert bounds.from_value <= spec.default <= bounds.to_value, spec.name
