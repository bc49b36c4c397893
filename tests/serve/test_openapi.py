"""The OpenAPI document is true: bodies made from it, right ones and wrong ones, get the answers that it names."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.serve.conftest import Running
from tests.serve.test_bodies import GOOD

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
#: bounds of what a made-up body may ask for, so that it is answered soon
SMALL = {"max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 16, "n": 2, "best_of": 2}
LIMITS = {"/v1/chat/completions": "max_tokens", "/v1/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
#: bodies a route; a longer run has more
EXAMPLES = int(os.environ.get("MLXKV_TEST_EXAMPLES", "3"))
ALL = list(HealthCheck)


@pytest.fixture(scope="module")
def document(server: Running):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def sensible(case: Any, turn: int) -> None:
    """Keep what is asked for small; in two of three cases name the model that is there."""
    if "anthropic-version" in (case.headers or {}) and turn % 3:
        case.headers["anthropic-version"] = "2023-06-01"
    if not isinstance(case.body, dict):
        return
    made = {name: min(case.body[name], most) for name, most in SMALL.items() if isinstance(case.body.get(name), int)}
    if turn % 3 and "model" in case.body:
        made["model"] = "llama"
    if isinstance(case.body.get("timeout"), (int, float)) and case.body["timeout"] > 0:
        made["timeout"] = 60  # one that is too short for any answer ends it with the 504 that it asks for
    limit = LIMITS.get(case.operation.path)
    if limit is not None and case.body.get(limit) is None:
        made[limit] = SMALL[limit]
    case.body = case.body | made


def asked(operation: Any, mode: GenerationMode, session: requests.Session) -> set[int]:
    """The statuses that bodies made for one route got; each answer is checked."""
    turns, seen = itertools.count(), set()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=ALL)
    @given(operation.as_strategy(generation_mode=mode))
    def run(case):
        sensible(case, turn := next(turns))
        if turn == 1 and mode == GenerationMode.POSITIVE:
            case.body = GOOD.get(operation.path, case.body)  # one that is answered, for sure
        seen.add(case.call_and_validate(checks=CHECKS, timeout=20, session=session).status_code)

    run()
    return seen


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_every_route(document, mode):
    """Bodies that keep to the document, and such that do not."""
    with requests.Session() as session:
        operations = [found.ok() for found in document.get_all_operations()]
        if mode == GenerationMode.NEGATIVE:  # a name in a path cannot be wrong in itself
            operations = [operation for operation in operations if operation.body]
        seen = {operation.path: asked(operation, mode, session) for operation in operations}
    assert seen.keys() >= GOOD.keys()
    if mode == GenerationMode.POSITIVE:
        assert all(200 in seen[path] for path in [*GOOD, "/v1/models", "/health", "/ready", "/metrics", "/v1/status"])


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
