"""Every error as OpenAI's error object: ``{"error": {"message", "type", "param", "code"}}``, or, on the paths of
Anthropic's API, as that one's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import DeadEnd, DeviceError, MlxkvError, RequestTimeout
from .anthropic_errors import anthropic_error, speaks_anthropic

log = logging.getLogger("mlxkv.serve")

#: seconds after which a refused client may try again
RETRY_S = 5
#: of a body that turned out so while it came
_CODES = {408: "request_too_slow", 413: "request_too_large"}
_LONGEST = 1000  # characters of a message; what a client sent is not sent back whole


def error_object(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    if len(message) > _LONGEST:
        message = message[:_LONGEST] + "…"
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def error_of(error: BaseException) -> dict[str, Any]:
    """The body for an exception; one that was not raised on purpose tells nothing of the inside."""
    if isinstance(error, MlxkvError):
        text = f"{error.message} {error.cure}".strip()
        return error_object(text, error.type, getattr(error, "param", None), error.code)
    return error_object("The server failed on this request.", "server_error", None, "internal_error")


def refusal(path: str, body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request for ``path`` that failed: ``body``, as ``error_object`` makes it, in the words of the API
    that the path belongs to."""
    if speaks_anthropic(path):
        body = anthropic_error(body["error"], status)
    return JSONResponse(body, status, headers=headers)


def headers_of(error: MlxkvError) -> dict[str, str]:
    """When to try again, or that there is no use in it: OpenAI's and Anthropic's client libraries repeat what failed
    with such a status, unless they are told not to."""
    if error.status in (429, 503):
        return {"Retry-After": str(RETRY_S)}
    return {"x-should-retry": "false"} if isinstance(error, (RequestTimeout, DeadEnd)) else {}


class Unforeseen:
    """ASGI middleware around the routes: an error that nobody foresaw is logged and answered. It goes no further:
    uvicorn would close the socket behind an answer that does not say so, on a client that asks the next thing."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception as error:
            if begun:  # only a socket that is closed can still tell
                raise
            log.error("%s failed", getattr(scope.get("route"), "path", "a request"), exc_info=error)
            await refusal(scope["path"], error_of(error), 500)(scope, receive, send)


def install(app: FastAPI, on_device_error: Callable[[DeviceError], None] | None, paths: Collection[str] = ()) -> None:
    """Answer every error of ``app`` this way. ``paths``: of its routes, one of which may have been meant."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, MlxkvError)
        if isinstance(error, DeviceError) and on_device_error is not None:
            on_device_error(error)
        return refusal(request.url.path, error_of(error), error.status, headers_of(error))

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return refusal(request.url.path, _validation(error), 400)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = error_object(str(error.detail), "invalid_request_error", None, _CODES.get(error.status_code))
        if error.status_code == 404:
            body = error_object(_nothing_there(request.url.path, paths), "not_found_error", None, "not_found")
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            text = f"{_shown(request.url.path)} takes {allowed}, not {request.method}."
            body = error_object(text, "invalid_request_error", None, "method_not_allowed")
        elif error.status_code == 400 and error.__cause__ is not None:  # FastAPI could not read the body
            body = error_object(_unreadable(error.__cause__), "invalid_request_error")
        return refusal(request.url.path, body, error.status_code, error.headers)

    app.add_exception_handler(MlxkvError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_middleware(Unforeseen)


def _unreadable(why: BaseException) -> str:
    """What is wrong with a body that Python's JSON reader gave up."""
    if isinstance(why, RecursionError):
        return "The body is no JSON that can be read: it is nested too deeply."
    if isinstance(why, UnicodeDecodeError):
        return f"The body is no JSON: it is not {why.encoding.upper()} at byte {why.start}."
    if isinstance(why, ValueError) and "digits" in str(why):
        return "The body is no JSON that can be read: a whole number in it has thousands of digits."
    return "The body cannot be read. Send a JSON object in UTF-8."


def _nothing_there(path: str, known: Collection[str]) -> str:
    """What is said of a path that is no route: most often the client's base URL has a ``/v1`` too many, or none."""
    cure = "/openapi.json lists what there is."
    for meant in (f"/v1{path}", path.removeprefix("/v1")):
        if meant != path and meant in known:
            cure = f"Did you mean {meant}? Then the base URL that the client was given needs "
            cure += "/v1 at its end." if meant.startswith(f"/v1{path}") else "no /v1 at its end."
    return f"There is nothing at {_shown(path)}. {cure}"


def _shown(path: str) -> str:
    path = path[:200]
    return path if path.isprintable() else ascii(path)


def _validation(error: RequestValidationError) -> dict[str, Any]:
    # A field of several types fails once for each; the one that got furthest is what the client meant.
    errors = error.errors()
    same = (e for e in errors if e["loc"][:2] == errors[0]["loc"][:2])
    first = max(same, key=lambda e: (len(e["loc"]), [part for part in e["loc"] if isinstance(part, int)]))
    where = list(first["loc"][first["loc"][0] in ("body", "query", "path") :])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return error_object(
            f"The body is not JSON: {reason} at byte {where[0] if where else 0}.", "invalid_request_error"
        )
    if first["type"] == "missing" and not where:
        return error_object("The body is empty.", "invalid_request_error")
    if not where:
        return error_object(
            "The body is not a JSON object. Send one, with Content-Type: application/json.", "invalid_request_error"
        )
    param = _spelled(where)
    text = "is missing" if first["type"] == "missing" else f"is not valid: {first['msg']}"
    cure = " Name one that /v1/models lists." if param == "model" else ""
    return error_object(f"{param} {text}.{cure}", "invalid_request_error", param, "invalid_value")


def _spelled(where: list[Any]) -> str:
    """``messages[0].content``; the names pydantic gives to the arms of a union are left out."""
    made = str(where[0])
    for part in where[1:]:
        if isinstance(part, int):
            made += f"[{part}]"
        elif part not in ("str", "int", "float", "bool", "[key]") and not part.startswith(("list[", "dict[")):
            made += f".{part}"
    return made
