"""``POST /v1/completions``, streaming and not: text that goes on from prompts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..decode.spelling import Spelling
from .answer import Answer, Tokens
from .attended import attended, time_limit
from .completions_logprobs import Lists, joined, nothing, of_prompt
from .completions_schema import CompletionRequest
from .errors import error_of
from .parts import Begun, Ended, Part, Text
from .reports import extension, usage_object
from .server import Server, Serving
from .several import Several
from .sse import EventStream, event

router = APIRouter()


@router.post("/v1/completions")
async def completions(server: Serving, body: CompletionRequest, request: Request) -> Response:
    """What goes on from each prompt, whole or as a stream of server-sent events."""
    began, limit = time.monotonic(), time_limit(server, body.checked_timeout())
    prompts = await attended(request, limit, _scorable(server, body))
    asked = body.to_asked(server, prompts)
    if body.scored and limit is not None:  # some of its time has gone
        asked = [replace(each, timeout=max(0.001, limit - (time.monotonic() - began))) for each in asked]
    if len(asked) > 1:
        answer = await Several.begin(server, asked, request)
    else:
        answer = await Answer.begin(server, asked[0], request)
    printer = Printer(answer, body, prompts)
    if body.stream:
        return EventStream(answer, printer)
    async with answer:
        async for part in answer:
            printer.pieces(part)
    return JSONResponse(printer.whole(), headers={"x-request-id": answer.id})


async def _scorable(server: Server, body: CompletionRequest) -> list[str | list[int]]:
    """The prompts, one by one; as ids where their log-probabilities are wanted, so that each number has its token."""
    prompts = body.prompts()
    if not body.scored:
        return prompts
    async with server.lease(body.model) as engine:
        return [await asyncio.to_thread(engine.tokenize, p) if isinstance(p, str) else p for p in prompts]


@dataclass
class Choice:
    """What one choice has said. echoed: characters of the prompt at the start of its text."""

    text: str = ""
    echoed: int = 0
    lists: Lists | None = None
    logprobs: dict[str, Any] | None = None
    ended: Ended | None = None


class Printer:
    """``text_completion`` objects; those of a stream have a piece of one choice each, the whole has all choices.

    A prompt's log-probabilities are known when its answer is whole: where they are echoed, a choice is one piece.
    """

    def __init__(self, answer: Answer | Several, body: CompletionRequest, ids: list[Any]) -> None:
        """``ids``: of each prompt, where its log-probabilities are wanted."""
        self.answer, self.body, self._ids = answer, body, ids
        self._prompts = body.prompts()
        self._choices = [Choice() for _ in range(len(self._prompts) * answer.asked.n)]
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)

    def pieces(self, part: Part) -> list[dict[str, Any]]:
        """What a part adds: objects of choices."""
        if not isinstance(part, (Begun, Text, Ended)):
            return []
        choice = self._choices[part.choice]
        before = len(choice.text)
        logprobs = None
        if isinstance(part, Begun):
            if self.body.echo:
                choice.text = self._prompt(part.choice)
                choice.echoed = len(choice.text)
        elif isinstance(part, Text):
            if self.body.max_tokens != 0:
                choice.text += part.text
                if self.body.logprobs is not None and part.logprobs:
                    tokens = [(told.id, told) for told in part.logprobs]
                    choice.lists = choice.lists or Lists(self._spell, before)
                    logprobs = choice.lists.add(tokens, part.text, len(choice.text))
                    choice.logprobs = joined([choice.logprobs, logprobs])
        else:
            choice.ended = part
            if self.body.scored:
                choice.logprobs = joined([self._scores(part), choice.logprobs])
                return [self._object(part.choice)]
            return [self._piece(part.choice, "", None, part)]
        if self.body.scored or (len(choice.text) == before and logprobs is None):
            return []
        return [self._piece(part.choice, choice.text[before:], logprobs)]

    def whole(self) -> dict[str, Any]:
        """The object of an answer that has ended."""
        made = self._head() | {"choices": [self._object(i) for i in range(len(self._choices))]}
        reports = [extension(self._end(i).completion) for i in range(len(self._choices))]
        made["mlxkv"] = reports[0] | ({"choices": reports} if len(reports) > 1 else {})
        return made | {"usage": usage_object(self._tokens())}

    # as the printer of a stream

    def start(self) -> str:
        return ""

    def part(self, part: Part) -> str:
        more = {"mlxkv": extension(part.completion)} if isinstance(part, Ended) else {}
        return "".join(self._chunk(piece, more) for piece in self.pieces(part))

    def ping(self) -> str:
        return self._chunk(self._piece(0, "", None), {})

    def end(self) -> str:
        usage = ""
        if self._include_usage:
            usage = event(self._head() | {"choices": [], "usage": usage_object(self._tokens())})
        return usage + event("[DONE]")

    def error(self, error: BaseException) -> str:
        return event(error_of(error)) + event("[DONE]")

    def _chunk(self, piece: dict[str, Any], more: dict[str, Any]) -> str:
        usage = {"usage": None} if self._include_usage else {}
        return event(self._head() | {"choices": [piece]} | usage | more)

    # objects

    def _head(self) -> dict[str, Any]:
        answer = self.answer
        return {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": answer.asked.model,
        }

    def _object(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        logprobs = choice.logprobs
        if logprobs is None and self.body.logprobs is not None:
            logprobs = nothing()
        return self._piece(index, choice.text, logprobs, self._end(index))

    def _piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None, ended: Ended | None = None
    ) -> dict[str, Any]:
        finish = None if ended is None else "length" if self.body.max_tokens == 0 else ended.finish
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _end(self, index: int) -> Ended:
        ended = self._choices[index].ended
        assert ended is not None
        return ended

    def _tokens(self) -> Tokens:
        """Each prompt once, with what was restored of it for its first choice; the sampled tokens of all choices."""
        usages = [self._end(i).completion.usage for i in range(len(self._choices))]
        first = usages[:: self.answer.asked.n]
        return Tokens(
            sum(usage.prompt_tokens for usage in first),
            sum(usage.cached_tokens for usage in first),
            0 if self.body.max_tokens == 0 else sum(usage.completion_tokens for usage in usages),
            0,
        )

    # prompts

    def _prompt(self, index: int) -> str:
        prompt = self._prompts[index // self.answer.asked.n]
        return prompt if isinstance(prompt, str) else self._engine.detokenize(prompt)

    def _scores(self, ended: Ended) -> dict[str, Any]:
        ids = self._ids[ended.choice // self.answer.asked.n]
        told = ended.completion.prompt_logprobs
        assert told is not None
        return of_prompt(ids, told, self._spell, self._choices[ended.choice].echoed)

    @property
    def _engine(self) -> Any:
        assert self.answer.engine is not None  # nothing has begun before it is there
        return self.answer.engine

    @cached_property
    def _spell(self) -> Spelling:
        return Spelling(self._engine.tokenizer)
