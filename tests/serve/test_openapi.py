"""The OpenAPI document is true: bodies made from it, right ones and wrong ones, get documented answers and no failure."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.serve.conftest import Running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
#: bounds of what a made-up body may ask for, so that it is answered soon
SMALL = {"max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 16, "n": 2, "best_of": 2}


@pytest.fixture(scope="module")
def document(server: Running):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


api = schemathesis.pytest.from_fixture("document")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Names the model that is there in two of three bodies, and keeps answers short."""
    if isinstance(body, dict):
        if isinstance(body.get("model"), str) and len(body["model"]) % 3:
            body["model"] = "llama"
        for name, most in SMALL.items():
            if isinstance(body.get(name), int):
                body[name] = min(body[name], most)
    return body


@api.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
def test_every_route(case):
    case.call_and_validate(checks=CHECKS, timeout=10)


def test_what_it_says(server, http):
    document = http.get("/openapi.json").json()
    routes = {path: set(operations) for path, operations in document["paths"].items()}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        answers = document["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "403", "404", "408", "413", "429", "500", "503", "504"} <= answers.keys()
        assert "422" not in answers
    assert {"/health", "/ready", "/v1/models", "/v1/models/{model}", "/detokenize"} <= routes.keys()
    assert "401" not in document["paths"]["/health"]["get"]["responses"]
    form = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    assert form["$ref"].endswith("AnthropicError")
