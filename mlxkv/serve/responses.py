"""``/v1/responses``: create (whole or streaming), look up, delete; conversations that go on from a kept response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..decode.request import TokenLogprob
from ..decode.spelling import Spelling
from ..errors import RequestError
from . import responses_input
from .answer import Answer
from .asking import count_prompt
from .attended import attended, time_limit
from .errors import error_of
from .parts import Asked, Ended, Part
from .reports import extension, logprobs_object
from .responses_output import Event, Output
from .responses_schema import ResponsesRequest
from .responses_store import Kept, Responses
from .server import Serving
from .sse import EventStream, event

router = APIRouter()


class ResponseNotFound(RequestError):
    """No response of that id is kept."""

    status = 404
    code = "response_not_found"


@router.post("/v1/responses")
async def create(server: Serving, body: ResponsesRequest, request: Request) -> Response:
    """A response, whole or as a stream of events."""
    kept = responses_of(request)
    messages, items, before = _conversation(body, kept)
    answer = await Answer.begin(server, body.to_asked(server, messages), request)
    running = Running(answer, body, kept, items, before)
    if body.stream:
        return EventStream(answer, running)
    async with answer:
        async for part in answer:
            running.feed(part)
    return JSONResponse(running.output.response, headers={"x-request-id": answer.id})


@router.post("/v1/responses/input_tokens")
async def input_tokens(server: Serving, body: ResponsesRequest, request: Request) -> dict[str, Any]:
    """How many tokens the same body would be read as, also where the model's context has no room for them."""
    messages, _, _ = _conversation(body, responses_of(request))
    asked = body.to_asked(server, messages)
    count = await attended(request, time_limit(server, asked.timeout), count_prompt(server, asked))
    return {"object": "response.input_tokens", "input_tokens": count}


@router.get("/v1/responses/{response_id}")
async def retrieve(response_id: str, request: Request) -> dict[str, Any]:
    """A response that is kept."""
    for name in ("stream", "starting_after"):
        if request.query_params.get(name) not in (None, "false"):
            raise RequestError(f"{name} is not supported.", "A kept response comes whole.", param=name)
    return _found(responses_of(request), response_id, "response_id").response


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, request: Request) -> dict[str, Any]:
    """Forget a response. Those that went on from it still can be gone on from."""
    kept = responses_of(request)
    _found(kept, response_id, "response_id")
    kept.remove(response_id)
    return {"id": response_id, "object": "response.deleted", "deleted": True}


def _conversation(
    body: ResponsesRequest, kept: Responses
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Kept | None]:
    """The messages of a conversation with this request's input at their end, that input's items, and the response that
    they follow. Raises RequestError."""
    before = None
    if body.previous_response_id is not None:
        before = _found(kept, body.previous_response_id, "previous_response_id")
    nothing = body.input is None or body.input == []
    if nothing and before is None:
        raise RequestError("input is missing.", "Give a text or a list of items.", param="input")
    items = [] if nothing else responses_input.checked(body.input, kept.item)
    earlier = [] if before is None else before.items()
    return responses_input.messages(earlier, items, body.instructions), items, before


def responses_of(request: Request) -> Responses:
    """The responses that this application keeps."""
    state = request.app.state
    if not hasattr(state, "responses"):
        state.responses = Responses()
    return state.responses


def _found(kept: Responses, id: str, param: str) -> Kept:
    found = kept.get(id)
    if found is None:
        raise ResponseNotFound(
            f"There is no response {id[:80]!r} here.",
            "Those that are kept are bounded and do not outlive the server; send the whole input instead.",
            param=param,
        )
    return found


@dataclass
class Running:
    """A response that is being made: the printer of its stream, and what is done with it when it is whole."""

    answer: Answer
    body: ResponsesRequest
    kept: Responses
    items: list[dict[str, Any]]
    before: Kept | None

    def __post_init__(self) -> None:
        self._spell: Spelling | None = None
        self.output = Output(
            head(self.answer, self.body),
            summary=self.body.summary is not None,
            sealed=self.body.sealed,
            logprobs=self._logprobs if self.body.logprobs else None,
            extension=extension,
        )

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        self._spell = self._spell or Spelling(self.answer.tokenizer)
        return logprobs_object(tokens, self._spell)["content"]

    def feed(self, part: Part) -> list[Event]:
        """The events of a part. What is whole is kept, unless the caller wants it not to be."""
        made = self.output.feed(part)
        if isinstance(part, Ended) and self.body.store is not False:
            self.kept.add(Kept(self.output.response, self.items, self.before))
        return made

    # as the printer of a stream

    def start(self) -> str:
        return _printed(self.output.begin())

    def part(self, part: Part) -> str:
        return _printed(self.feed(part))

    def ping(self) -> str:
        return _printed([self.output.ping()])

    def end(self) -> str:
        return ""

    def error(self, error: BaseException) -> str:
        return _printed(self.output.fail(error, error_of(error)["error"]["message"]))


def _printed(events: list[Event]) -> str:
    return "".join(event(made, made["type"]) for made in events)


def head(answer: Answer, body: ResponsesRequest) -> dict[str, Any]:
    """The fields of the response object that do not change, as they are in force."""
    asked: Asked = answer.asked
    sampling = asked.request.sampling
    reasoning = body.reasoning
    form = (body.text and body.text.format) or {"type": "text"}
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": asked.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": body.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
        "metadata": body.metadata or {},
    }
