"""``POST /v1/messages``, streaming and not, and ``POST /v1/messages/count_tokens``: Anthropic's Messages API."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse, Response

from ..errors import MlxkvError, RequestError
from .answer import Answer
from .anthropic_errors import anthropic_error
from .anthropic_events import PING, Event, Events, folded
from .anthropic_schema import CountRequest, MessagesRequest
from .asking import count_prompt
from .attended import attended, time_limit
from .errors import error_of
from .parts import Part
from .server import Serving
from .sse import EventStream, event

#: the first version whose form is spoken here; the one before it streamed in another. 2026-10-21 only takes away fields
#: that this server goes on honouring.
OLDEST = "2023-06-01"


async def _version(anthropic_version: Annotated[str | None, Header()] = None) -> None:
    if anthropic_version is None:
        return
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", anthropic_version) or anthropic_version < OLDEST:
        raise RequestError(
            f"The header anthropic-version is {anthropic_version[:80]!r}.",
            f"Send {OLDEST} or a later one, or leave it out.",
            param="anthropic-version",
        )


router = APIRouter(dependencies=[Depends(_version)])


@router.post("/v1/messages")
async def messages(server: Serving, body: MessagesRequest, request: Request) -> Response:
    """An answer in blocks, whole or as a stream of server-sent events."""
    answer = await Answer.begin(server, body.to_asked(server), request)
    made = Events(
        answer.id,
        body.model,
        body.max_tokens,
        hidden=body.thinking is not None and body.thinking.display == "omitted",
        unsure=body.diagnostics is not None and body.diagnostics.previous_message_id is not None,
    )
    if body.stream:
        return EventStream(answer, MessagePrinter(made))
    async with answer:
        events = [event async for part in answer for event in made.of(part)]
    return JSONResponse(folded(events), headers=_headers(answer.id))


@router.post("/v1/messages/count_tokens")
async def count_tokens(server: Serving, body: CountRequest, request: Request) -> dict[str, Any]:
    """How many tokens a prompt has, also where the model's context has no room for it."""
    asked = body.to_asked(server)
    count = await attended(request, time_limit(server, asked.timeout), count_prompt(server, asked))
    return {"input_tokens": count}


class MessagePrinter:
    """The events of one message. ``message_start`` waits for the turn of the request, when what was cached is known;
    until then comments keep the stream alive. An error is an event of its own, and the last."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def start(self) -> str:
        return ""

    def part(self, part: Part) -> str:
        return "".join(map(_printed, self._events.of(part)))

    def ping(self) -> str:
        return _printed(PING) if self._events.begun else ": ping\n\n"

    def end(self) -> str:
        return ""

    def error(self, error: BaseException) -> str:
        status = error.status if isinstance(error, MlxkvError) else 500
        return _printed(anthropic_error(error_of(error)["error"], status, self._events.id))


def _printed(value: Event) -> str:
    return event(value, value["type"])


def _headers(request_id: str) -> dict[str, str]:
    return {"request-id": request_id, "x-request-id": request_id}
