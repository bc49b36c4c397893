"""Errors as Anthropic's clients know them: ``{"type": "error", "error": {"type", "message", …}, "request_id"}``."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_error(error: dict[str, Any], status: int, request_id: str | None = None) -> dict[str, Any]:
    """OpenAI's ``error`` (message, type, param, code) in Anthropic's form: the type follows the status, the code stands
    in the details. ``param`` stays, as this server's own; the message names it too, as clients show little else."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message, param = error["message"], error.get("param")
    if param is not None and param not in message:
        message = f"{param}: {message}"
    made: dict[str, Any] = {"type": kind, "message": message}
    if error.get("code") is not None:
        made["details"] = {"error_code": error["code"]}
    if param is not None:
        made["param"] = param
    return {"type": "error", "error": made, "request_id": request_id}
