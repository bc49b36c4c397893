"""``POST /v1/chat/completions``, streaming and not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..decode.request import TokenLogprob
from ..decode.spelling import Spelling
from .answer import Answer, Whole, WholeChoice, collect
from .errors import error_of
from .parts import Arguments, Begun, Call, Ended, Part, Reading, Text, Thought
from .reports import extension, logprobs_object, usage_object
from .schema import ChatRequest
from .server import Serving
from .sse import EventStream, dump, event

router = APIRouter()

_DONE = event("[DONE]")


@router.post("/v1/chat/completions")
async def chat_completions(server: Serving, body: ChatRequest, request: Request) -> Response:
    """A chat completion, whole or as a stream of server-sent events."""
    answer = await Answer.begin(server, body.to_asked(server), request)
    if body.stream:
        return EventStream(answer, ChatPrinter(answer, body))
    whole = await collect(answer)

    def respond() -> Response:
        return JSONResponse(completion_object(answer, whole, body), headers={"x-request-id": answer.id})

    # log-probabilities can be many megabytes, for which nobody else is to wait
    return await asyncio.to_thread(respond) if body.logprobs else respond()


def completion_object(answer: Answer, whole: Whole, body: ChatRequest) -> dict[str, Any]:
    """The ``chat.completion`` object, with mlxkv's own reports under ``mlxkv``: those of choice 0, and where there are
    more, of each."""
    spell = Spelling(answer.tokenizer) if body.logprobs else None
    made = _head(answer, "chat.completion")
    made["choices"] = [_choice(i, choice, spell, body.shows_thoughts) for i, choice in enumerate(whole.choices)]
    made["usage"] = usage_object(whole.tokens)
    reports = [extension(choice.end.completion) for choice in whole.choices]
    made["mlxkv"] = reports[0] | ({"choices": reports} if len(reports) > 1 else {})
    return made


def _choice(index: int, choice: WholeChoice, spell: Spelling | None, thoughts: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
    message["refusal"] = None
    if choice.thought and thoughts:
        message["reasoning_content"] = choice.thought
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    logprobs = None if spell is None else logprobs_object(choice.logprobs, spell)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.end.finish}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.asked.model}


class ChatPrinter:
    """``chat.completion.chunk`` objects: of each choice the role first, then what it says, and one finish_reason; then
    usage if it is wanted, and ``[DONE]``. After an error nothing but the error and ``[DONE]``."""

    def __init__(self, answer: Answer, body: ChatRequest) -> None:
        options = body.stream_options
        self._answer = answer
        self._usage = bool(options and options.include_usage)
        self._progress = bool(options and options.include_progress)
        self._logprobs, self._thoughts = bool(body.logprobs), body.shows_thoughts
        self._spell: Spelling | None = None
        self._whole = Whole.of(answer.asked.n)
        self._head = _head(answer, "chat.completion.chunk")
        self._roles: set[int] = set()  # choices whose role was said
        self._frames: dict[int, tuple[str, str]] = {}

    def start(self) -> str:
        return self._role(0)

    def part(self, part: Part) -> str:
        self._whole.add(part)
        if isinstance(part, Text):
            if self._logprobs and part.logprobs:
                return self._chunk(part.choice, {"content": part.text}, logprobs=part.logprobs)
            if part.text:  # by far the most chunks: only what differs is made anew
                before, after = self._around(part.choice)
                return before + dump(part.text) + after
        elif isinstance(part, Thought):
            if part.text and self._thoughts:
                return self._chunk(part.choice, {"reasoning_content": part.text})
        elif isinstance(part, Call):
            function = {"name": part.name, "arguments": ""}
            return self._call(part, {"id": part.id, "type": "function", "function": function})
        elif isinstance(part, Arguments):
            return self._call(part, {"function": {"arguments": part.text}})
        elif isinstance(part, Ended):
            return self._chunk(part.choice, {}, part.finish, {"mlxkv": extension(part.completion)})
        elif isinstance(part, Begun):
            return self._role(part.choice)
        elif isinstance(part, Reading) and self._progress:
            return self._apart({"progress": {"choice": part.choice, "done": part.done, "total": part.total}})
        return ""

    def ping(self) -> str:
        return self._chunk(0, {})

    def end(self) -> str:
        if not self._usage:
            return _DONE
        return event(self._head | {"choices": [], "usage": usage_object(self._whole.tokens)}) + _DONE

    def error(self, error: BaseException) -> str:
        return event(error_of(error)) + _DONE

    def _around(self, choice: int) -> tuple[str, str]:
        """A chunk of text, before and behind the text."""
        if choice not in self._frames:
            before, _, after = self._chunk(choice, {"content": "\0"}).partition(dump("\0"))
            self._frames[choice] = before, after
        return self._frames[choice]

    def _role(self, choice: int) -> str:
        if choice in self._roles:
            return ""
        self._roles.add(choice)
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def _call(self, part: Call | Arguments, said: dict[str, Any]) -> str:
        return self._chunk(part.choice, {"tool_calls": [{"index": part.index} | said]})

    def _apart(self, said: dict[str, Any]) -> str:
        """A chunk without a choice, with mlxkv's own words."""
        return event(self._head | {"choices": [], "mlxkv": said} | ({"usage": None} if self._usage else {}))

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        finish: str | None = None,
        more: dict[str, Any] | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> str:
        told = None
        if logprobs and self._logprobs:
            self._spell = self._spell or Spelling(self._answer.tokenizer)
            told = logprobs_object(logprobs, self._spell)
        made = {"index": choice, "delta": delta, "logprobs": told, "finish_reason": finish}
        return event(self._head | {"choices": [made]} | (more or {}) | ({"usage": None} if self._usage else {}))
