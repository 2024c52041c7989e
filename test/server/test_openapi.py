"""Schemathesis reads /openapi.json and holds the running server to it: bodies as described, and bodies that are not."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig

from server.serving import CAMERAS, GENERATIONS, PROMPT, STATE

EXAMPLES = settings(max_examples=40, suppress_health_check=list(HealthCheck))
IMAGE = [[[0, 128, 255], [255, 128, 0]]]
OBSERVATION = {"images": dict.fromkeys(CAMERAS, IMAGE), "state": STATE.tolist()}

every_route = schemathesis.pytest.from_fixture("document")
actions = schemathesis.pytest.from_fixture("positive").include(path=GENERATIONS)


def read(url: str, config: dict[str, Any]) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json", config=SchemathesisConfig.from_dict(config))


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    """What is described may still be wrong: a camera that is not there, too few numbers."""
    accepted = {"expected-statuses": ["2xx", "400"]}
    refused = {"expected-statuses": ["400", "415"]}
    return read(url, {"checks": {"positive_data_acceptance": accepted, "negative_data_rejection": refused}})


@pytest.fixture(scope="module")
def positive(url: str) -> Any:
    return read(url, {"generation": {"mode": "positive"}})


@every_route.parametrize()
@EXAMPLES
def test_every_route_is_as_described(case: schemathesis.Case) -> None:
    """Status, content type and body, for good requests and bad ones; no 5xx, nor a method that is not there."""
    case.call_and_validate()


@actions.parametrize()
@EXAMPLES
def test_options_as_described_are_accepted(case: schemathesis.Case) -> None:
    """Of a good observation: then there is no reason to refuse it."""
    body: dict[str, Any] = case.body if isinstance(case.body, dict) else {}
    parameters, runtime = {**body.get("parameters", {})}, {**body.get("runtime", {})}
    if parameters.get("num_inference_steps"):
        parameters["num_inference_steps"] = min(parameters["num_inference_steps"], 4)  # for time
    for name in ("action_horizon", "action_dim"):  # the one that there is, or none
        parameters.pop(name, None)
    runtime["timeout_ms"] = 60_000.0
    case.media_type = "application/json"
    case.body = {
        **body,
        "input": {"prompt": PROMPT, "observation": OBSERVATION},
        "parameters": parameters,
        "runtime": runtime,
    }
    response = case.call_and_validate()
    assert response.status_code == 200


def test_the_document_is_openapi(document: Any) -> None:
    document.validate()


def test_bounds_are_described(document: Any) -> None:
    """A schema without them would still be valid, and nothing would hold a client to them."""
    properties = document.raw_schema["components"]["schemas"]["Parameters"]["properties"]
    assert {"type": "integer", "minimum": 1, "maximum": 1000} in properties["num_inference_steps"]["anyOf"]
