"""Who may ask, and how much at once.

A page of another site that had its name pointed at this machine (DNS rebinding) may not ask, and a body has a limit.
"""

from __future__ import annotations

import ipaddress
import socket

from fastapi import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import error_object


class HostGuard:
    """Refuses requests whose Host header is neither an address, nor a loopback name, nor one of this server's names.

    An address cannot be rebound, a name of somebody else's can: that is the whole rule.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        own = socket.gethostname().lower()
        self.names = {"localhost", host.lower(), own, f"{own.removesuffix('.local')}.local"} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        if self.allows(header):
            await self.app(scope, receive, send)
            return
        body = error_object(
            f"The Host header {header[:100]!r} names another server.", "invalid_request_error", None, "host_not_allowed"
        )
        await JSONResponse(body, 403)(scope, receive, send)

    def allows(self, header: str) -> bool:
        """Whether a Host header, with or without a port, is this server's."""
        header = header.strip().lower()
        if not header:  # HTTP/1.0, which no browser speaks
            return True
        if header.startswith("["):
            name = header[1:].partition("]")[0]
        else:
            name = header.partition(":")[0].rstrip(".")
        if name in self.names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class BodyLimit:
    """Answers 413 to a body of more than ``limit`` bytes, announced or not, without keeping it."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        text = f"The body is larger than {self.limit:,} bytes."
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced) > self.limit:
            await JSONResponse(error_object(text, "invalid_request_error"), 413)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise HTTPException(413, text)
            return message

        await self.app(scope, counted, send)
