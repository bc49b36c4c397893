"""``POST /v1/completions``, streaming and not: text that goes on from prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from .answer import Answer
from .completions_logprobs import listed
from .completions_schema import CompletionRequest
from .parts import Begun, Ended, Part, Text
from .server import Server
from .several import Several
from .sse import EventStream

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """What goes on from each prompt, whole or as a stream of server-sent events."""
    server: Server = request.app.state.server
    asked = body.to_asked(server)
    begin = Several.begin(server, asked, request) if len(asked) > 1 else Answer.begin(server, asked[0], request)
    answer = await begin
    printer = Printer(answer, body)
    if body.stream:
        return EventStream(answer, printer)
    async with answer:
        async for part in answer:
            printer.piece(part)
    return JSONResponse(printer.whole(), headers={"x-request-id": answer.id})


@dataclass
class Choice:
    """What one choice has said. echoed: characters of the prompt that stand before it."""

    echoed: str | None = None
    text: str = ""
    logprobs: dict[str, Any] | None = None
    ended: Ended | None = None
    waiting: list[dict[str, Any]] = field(default_factory=list)


class Printer:
    """``text_completion`` objects, of which a stream's have a piece of a choice each and the whole has all.

    A prompt's log-probabilities are known when its answer is; a stream that echoes them has one piece a choice.
    """

    def __init__(self, answer: Answer | Several, body: CompletionRequest) -> None:
        self.answer, self.body = answer, body
        self._prompts = body.prompts()
        self._choices = [Choice() for _ in range(len(self._prompts) * answer.asked.n)]
        self._scored = bool(body.echo) and body.logprobs is not None

    def piece(self, part: Part) -> list[dict[str, Any]]:
        """The pieces of choices that a part makes."""
        if not isinstance(part, (Begun, Text, Ended)):
            return []
        choice = self._choices[part.choice]
        if isinstance(part, Begun):
            return self._echo(part.choice)
        if isinstance(part, Ended):
            choice.ended = part
            return self._end(part)
        if self.body.max_tokens == 0:
            return []
        logprobs = None
        if self.body.logprobs is not None and part.logprobs:
            logprobs = listed(part.logprobs, self._spell, len(choice.text), len(part.text))
        return self._add(part.choice, part.text, logprobs)
