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
    """OpenAI's ``error`` (message, type, param, code) in Anthropic's form. Its type follows the status; ``param`` and
    ``code`` stay, as this server's own."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    made = {"type": kind, "message": error["message"]}
    made |= {key: error[key] for key in ("param", "code") if error.get(key) is not None}
    return {"type": "error", "error": made, "request_id": request_id}
