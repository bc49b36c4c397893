"""``/v1/responses``: create (whole or streaming), look up, delete; conversations that go on from a kept response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..errors import RequestError
from . import responses_input
from .answer import Answer
from .errors import error_of
from .fields import renamed
from .parts import Asked, Part
from .responses_output import Event, Output
from .responses_schema import ResponsesRequest
from .responses_store import Kept, Responses
from .server import Serving
from .sse import EventStream, event

router = APIRouter()

#: what the engine's fields are called in this API
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "grammar": "text.format", "salt": "cache_salt"}


class ResponseNotFound(RequestError):
    """No response of that id is kept."""

    status = 404
    code = "response_not_found"


@router.post("/v1/responses")
async def create(server: Serving, body: ResponsesRequest, request: Request) -> Response:
    """A response, whole or as a stream of events."""
    kept = responses_of(request)
    before = None
    if body.previous_response_id is not None:
        before = _found(kept, body.previous_response_id, "previous_response_id")
    if body.input is None and before is None:
        raise RequestError("input is missing.", "Give a text or a list of items.", param="input")
    items = [] if body.input is None else responses_input.checked(body.input, kept.item)
    earlier = [] if before is None else before.items()
    messages = responses_input.messages(earlier, items, body.instructions)
    with renamed(_NAMES):
        answer = await Answer.begin(server, body.to_asked(server, messages), request)
    running = Running(answer, body, kept, items, before)
    if body.stream:
        return EventStream(answer, running)
    async with answer:
        async for part in answer:
            running.feed(part)
    return JSONResponse(running.output.response, headers={"x-request-id": answer.id})


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
        self.output = Output(
            head(self.answer, self.body), summary=self.body.summary is not None, sealed=self.body.sealed
        )

    def feed(self, part: Part) -> list[Event]:
        """The events of a part. What is whole is kept, unless the caller wants it not to be."""
        made = self.output.feed(part)
        if self.output.done and self.body.store is not False:
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
