"""At the door: who may ask, from where, how much, and how slowly. It stands before every route.

A page of another site may not ask, whether it has its name pointed at this machine (DNS rebinding: the Host header) or
sends a form to it (the Origin header); a key is asked for where there is one; a body has a limit and must keep coming;
and once the server was told to stop, new work is refused.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from fastapi import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import error_object, refusal

if TYPE_CHECKING:
    from .server import Server

#: what may be had without a key: whether it lives, and the page, which asks for the key itself
PUBLIC = ("/", "/favicon.ico", "/health", "/ready")
PUBLIC_FOLDER = "/web/"
#: seconds after which a client may ask again
RETRY_AFTER = "5"
#: bytes of a request's target and headers
MAX_HEAD = 64 * 2**10
#: bytes a second that a body must come at on the whole, so that no drop now and then keeps it open
SLOWEST = 4096


class Guard:
    """ASGI middleware around the whole application of ``server``, whose settings are read at each request."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        origin = headers.get("origin")
        if origin is not None and self._from_elsewhere(origin, headers):
            send = _with_origin(send, origin)
        answer = self._refusal(scope, headers)
        if answer is None and origin is not None and _is_preflight(scope, headers):
            answer = _preflight(headers)
        if answer is not None:
            await answer(scope, receive, send)
            return
        works = scope["method"] == "POST"
        self.server.working += works
        try:
            await self.app(scope, self._body(receive), send)
        finally:
            self.server.working -= works

    def _from_elsewhere(self, origin: str, headers: dict[str, str]) -> bool:
        """Whether the page is another site's that may ask: only then a browser must be told so."""
        safety, host = self.server.safety, headers.get("host", "")
        return safety.knows_origin(origin, host) and not safety.is_own(origin, host)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        safety, path, method = self.server.safety, scope["path"], scope["method"]
        host, origin = headers.get("host", ""), headers.get("origin")
        size = len(path) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEAD:
            text = f"The path and the headers are larger than {MAX_HEAD:,} bytes."
            return _refused("", 431, text, "invalid_request_error", "headers_too_large")
        if not safety.knows_host(host):
            text = f"The Host header {host[:100]!r} names another server. Allow it with --allow-host."
            return _refused(path, 403, text, "permission_error", "host_not_allowed")
        if origin is not None and not safety.knows_origin(origin, host):
            text = f"Pages of the origin {origin[:100]!r} may not use this server. Allow it with --cors-origin."
            return _refused(path, 403, text, "permission_error", "origin_not_allowed")
        if origin is not None and _is_preflight(scope, headers):
            return None  # a browser sends no key with it
        public = method in ("GET", "HEAD") and (path in PUBLIC or path.startswith(PUBLIC_FOLDER))
        if not public and not safety.knows_key(headers):
            text = "This server needs an API key, and the request has none that it knows. Send it as a Bearer token."
            more = {"WWW-Authenticate": "Bearer"}
            return _refused(path, 401, text, "authentication_error", "invalid_api_key", more)
        if self.server.draining and method == "POST":
            more = {"Retry-After": RETRY_AFTER, "Connection": "close"}
            return _refused(path, 503, "The server is stopping.", "overloaded_error", "engine_closed", more)
        announced, limit = headers.get("content-length", "0"), self.server.limits.max_body
        if not (announced.isascii() and announced.isdigit()) or int(announced[:20]) > limit:
            return _refused(path, 413, _too_large(limit), "invalid_request_error", "request_too_large")
        encoding = headers.get("content-encoding", "").strip()
        if encoding.lower() not in ("", "identity"):
            text = f"The body is encoded as {encoding[:80]!r}. Send it plain, without Content-Encoding."
            return _refused(path, 415, text, "invalid_request_error", "unsupported_encoding")
        return None

    def _body(self, receive: Receive) -> Receive:
        """``receive`` that counts a body, announced or not, and does not wait for ever for the rest of it."""
        seen, whole, began = 0, False, time.monotonic()

        async def counted() -> Message:
            nonlocal seen, whole
            limits = self.server.limits
            if whole:
                return await receive()
            left = began + limits.body_s + seen / SLOWEST - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, min(limits.body_s, left)))
            except TimeoutError:
                text = f"Only {seen:,} bytes of the body came in {time.monotonic() - began:.1f} seconds."
                raise HTTPException(408, text, {"Connection": "close"}) from None
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > limits.max_body:
                raise HTTPException(413, _too_large(limits.max_body))
            return message

        return counted


def _refused(
    path: str, status: int, message: str, type: str, code: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    return refusal(path, error_object(message, type, None, code), status, headers)


def _too_large(limit: int) -> str:
    return f"The body is larger than {limit:,} bytes."


def _is_preflight(scope: Scope, headers: dict[str, str]) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _preflight(headers: dict[str, str]) -> Response:
    """What a browser asks before it lets a page of another site send something."""
    told = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "")[:1000] or "*",
        "Access-Control-Max-Age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        told["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=told)


def _with_origin(send: Send, origin: str) -> Send:
    """Answers, errors too, say that this page may read them."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", b"retry-after"),
                (b"vary", b"origin"),
            ]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return told
