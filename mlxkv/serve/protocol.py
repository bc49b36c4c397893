"""HTTP/1.1 on one socket, with bounds that uvicorn's own protocol does not have.

A socket too many is told so with a 503 instead of being left in a backlog; who does not send a request, or does not
read an answer, is cut off in time; and what is no HTTP at all gets a JSON error too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .errors import RETRY_S, error_object

if TYPE_CHECKING:
    from .server import Server

#: seconds that a client may leave an answer unread once the socket's buffers are full
WRITE_S = 300.0
#: seconds for which a refused client is listened to, so that it can read why; sockets beyond the limit that may do so
LINGER_S, LINGERING = 2.0, 64


def protocol_of(server: Server) -> type[H11Protocol]:
    """The ``http`` class of a ``uvicorn.Config`` for ``server``, whose limits are read as connections come."""

    class Bounded(Protocol):
        offered = server

    return Bounded


class Protocol(H11Protocol):
    """``_reading`` runs while the client owes a request's headers, or the rest of a body that nobody reads any more;
    ``_writing`` while it takes nothing of an answer. ``_ended``: it was refused, and what it still sends is of no
    interest."""

    offered: Server
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self.offered.limits
        if len(self.connections) > limits.max_connections:
            text = f"More than {limits.max_connections} connections are open already."
            self._end(503, error_object(text, "overloaded_error", None, "too_many_connections"))
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading = _cancelled(self._reading)
        self._writing = _cancelled(self._writing)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended or self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            if self._reading is None:
                self._expect_request()  # a byte of the next request has come; the rest must follow
        elif self.cycle is not None and not self.cycle.response_complete:
            self._reading = _cancelled(self._reading)  # the headers are there; the guard watches over the body

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # answered already: what still comes of the body is thrown away
            self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = _cancelled(self._writing)

    def send_400_response(self, msg: str) -> None:
        error = sys.exc_info()[1]  # called where the parser's error was caught
        status = getattr(error, "error_status_hint", 400)
        self._end(status, error_object(f"This is no HTTP request: {error or msg}.", "invalid_request_error"))

    def _expect_request(self) -> None:
        _cancelled(self._reading)
        self._reading = self.loop.call_later(self.offered.limits.header_s, self._too_slow)

    def _too_slow(self) -> None:
        self._reading = None
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._end(408, error_object("The request did not come to its end in time.", "invalid_request_error"))
        else:  # nothing was asked, or it was answered
            self.transport.close()

    def _end(self, status: int, body: dict[str, object]) -> None:
        """Answer and close; where an answer has begun already, only close. What the client still sends is taken for a
        moment and thrown away: it would not get to read the answer of a socket that is closed on unread data."""
        if self.transport.is_closing() or self._ended:
            return
        self._ended = True
        self._reading = _cancelled(self._reading)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        text = json.dumps(body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(text)).encode()),
            (b"connection", b"close"),
            *([(b"retry-after", str(RETRY_S).encode())] if status == 503 else []),
        ]
        response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES.get(status, b""))
        for event in (response, h11.Data(data=text), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if (
            len(self.connections) > self.offered.limits.max_connections + LINGERING
            or not self.transport.can_write_eof()
        ):
            self.transport.close()
            return
        self.transport.write_eof()
        self._reading = self.loop.call_later(LINGER_S, self.transport.close)


def _cancelled(alarm: asyncio.TimerHandle | None) -> None:
    if alarm is not None:
        alarm.cancel()
