"""The OpenAPI document at ``/openapi.json``, with what a route can really answer.

FastAPI knows the bodies; what the guard and the life of a request add to every route is said here, once.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .anthropic_errors import speaks_anthropic
from .guard import PUBLIC

#: what may come back beside the answer, by status
GUARDED = {403: "The Host or the Origin header names another server.", 408: "The body did not come in time."}
KEYED = {401: "An API key is needed."}
BODY = {
    400: "A field is missing, unknown or not valid; `param` names it.",
    413: "The body is too large.",
    415: "The body is compressed.",
}
WORK = {
    404: "There is no such model.",
    429: "Too many requests wait; try again after `Retry-After` seconds.",
    500: "The request failed while it was answered.",
    503: "The server is starting, stopping, or out of order; try again after `Retry-After` seconds.",
    504: "The request took longer than it may.",
}
FOUND = {400: "A parameter is not valid.", 404: "There is no such thing."}
#: routes whose answers stream where the body asks for it
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
#: one event of a stream; ``data`` is JSON, or ``[DONE]``
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
#: answers that are no JSON
PLAIN = ("/metrics",)

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def install(app: FastAPI) -> None:
    """Serve the document of ``app``, which is made when it is asked for the first time."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way of extending it


def _document(app: FastAPI) -> dict[str, Any]:
    try:
        number = version("mlxkv")
    except PackageNotFoundError:
        number = "0"
    made = get_openapi(title="mlxkv", version=number, routes=app.routes)
    parts = made.setdefault("components", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form, which is not what is sent
        parts.get("schemas", {}).pop(name, None)
    parts.setdefault("schemas", {}).update({"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR})
    parts["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            _complete(path, method, operation)
    return made


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    told = dict(GUARDED)
    if path not in PUBLIC:
        operation["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
        told |= KEYED
    if method == "post":
        told |= BODY | WORK
    elif "{" in path or operation.get("parameters"):
        told |= FOUND
    name = "AnthropicError" if speaks_anthropic(path) else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    for status, description in told.items():
        answers.setdefault(
            str(status), {"description": description, "content": {"application/json": {"schema": schema}}}
        )
    if path in STREAMS and method == "post":
        answers["200"].setdefault("content", {})["text/event-stream"] = {"schema": _EVENT}
    if path in PLAIN:
        answers["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    operation["responses"] = dict(sorted(answers.items()))
