"""Server-sent events: how the parts of an answer reach a client that streams, the same for every API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import ClientGone
from .answer import Answer
from .parts import Part, Ping

if TYPE_CHECKING:
    from .several import Several

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


#: JSON in one line, as short as it gets
dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event(value: Mapping[str, Any] | str, name: str | None = None) -> str:
    """One event: ``data`` in one line (text as it is, anything else as JSON), under ``event: name`` if it has one."""
    data = value if isinstance(value, str) else dump(value)
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


def comment(text: str) -> str:
    """A line that every client skips."""
    return f": {text}\n\n"


class Printer(Protocol):
    """A route's own format. Each method gives the events to send, as made by ``event``, "" for none."""

    def start(self) -> str:
        """Sent with the headers, before anything is known."""
        ...

    def part(self, part: Part) -> str:
        """For each part but ``Ping``."""
        ...

    def ping(self) -> str:
        """A chunk that changes nothing, for clients that do not count comments as life."""
        ...

    def end(self) -> str:
        """After the last part of an answer that did not fail; the terminator included."""
        ...

    def error(self, error: BaseException) -> str:
        """Instead of the rest: the error, and the terminator of a stream that failed."""
        ...


class EventStream(Response):
    """Headers at once, then the answer as ``printer`` writes it. However it ends, the answer is closed: nothing runs on
    for a client that left. Who takes no byte for long is hung up on by ``protocol``."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer | Several, printer: Printer) -> None:
        self.answer, self.printer = answer, printer
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS | {"x-request-id": answer.id})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        self.raw_headers = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()]
        self.raw_headers.append((b"content-type", b"text/event-stream; charset=utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.answer as answer:

            async def write(text: str, more: bool = True) -> None:
                if text or not more:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await write(self.printer.start())
                while parts := await answer.some():
                    await write("".join(map(self._printed, parts)))
                await write(self.printer.end(), more=False)
            except (ClientGone, OSError) as error:  # nobody reads any more
                await answer.close(error if isinstance(error, ClientGone) else ClientGone("The client hung up."))
            except Exception as error:
                await answer.close(error)
                await write(self.printer.error(error), more=False)

    def _printed(self, part: Part) -> str:
        if not isinstance(part, Ping):
            return self.printer.part(part)
        return self.printer.ping() if self.answer.server.limits.ping == "chunk" else comment("ping")
