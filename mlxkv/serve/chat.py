"""``POST /v1/chat/completions``, streaming and not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ..decode.request import Completion
from .answer import Answer, Tokens, Whole, WholeChoice, collect
from .errors import error_of
from .parts import Begun, Ended, Part, Text
from .schema import ChatRequest
from .server import Serving
from .sse import EventStream, event

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(server: Serving, body: ChatRequest, request: Request) -> Response:
    """A chat completion, whole or as a stream of server-sent events."""
    answer = await Answer.begin(server, body.to_asked(server), request)
    if body.stream:
        options = body.stream_options
        return EventStream(answer, ChatPrinter(answer, bool(options and options.include_usage)))
    whole = await collect(answer)
    return JSONResponse(completion_object(answer, whole), headers={"x-request-id": answer.id})


def completion_object(answer: Answer, whole: Whole) -> dict[str, Any]:
    """The ``chat.completion`` object, with mlxkv's own reports under ``mlxkv``."""
    made = _head(answer, "chat.completion")
    made["choices"] = [_choice(i, choice) for i, choice in enumerate(whole.choices)]
    made["usage"] = usage_object(whole.tokens)
    return made | {"mlxkv": extension(whole.choices[0].end.completion)}


def _choice(index: int, choice: WholeChoice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.end.finish}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.asked.model}


@dataclass
class ChatPrinter:
    """``chat.completion.chunk`` objects: of each choice the role first, then text, one finish_reason; then usage if it
    is wanted, and ``[DONE]``."""

    answer: Answer
    include_usage: bool = False

    def __post_init__(self) -> None:
        self._whole = Whole.of(self.answer.asked.n)

    def start(self) -> str:
        return self._chunk(0, {"role": "assistant", "content": ""})

    def part(self, part: Part) -> str:
        self._whole.add(part)
        if isinstance(part, Text) and part.text:
            return self._chunk(part.choice, {"content": part.text})
        if isinstance(part, Begun) and part.choice:
            return self._chunk(part.choice, {"role": "assistant", "content": ""})
        if isinstance(part, Ended):
            return self._chunk(part.choice, {}, part.finish, {"mlxkv": extension(part.completion)})
        return ""

    def ping(self) -> str:
        return self._chunk(0, {})

    def end(self) -> str:
        usage = ""
        if self.include_usage:
            head = _head(self.answer, "chat.completion.chunk")
            usage = event(head | {"choices": [], "usage": usage_object(self._whole.tokens)})
        return usage + event("[DONE]")

    def error(self, error: BaseException) -> str:
        return event(error_of(error)) + event("[DONE]")

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, more: dict[str, Any] | None = None
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        made = _head(self.answer, "chat.completion.chunk") | {"choices": [choice]} | (more or {})
        return event(made | ({"usage": None} if self.include_usage else {}))


def usage_object(tokens: Tokens) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "total_tokens": tokens.prompt + tokens.completion,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
        "completion_tokens_details": {"reasoning_tokens": tokens.thought},
    }


def extension(completion: Completion) -> dict[str, Any]:
    """What mlxkv tells beyond OpenAI's API: ``{"cache": CacheReport, "timings": Timings, "drafts": DraftReport}``."""
    return {name: asdict(getattr(completion, name)) for name in ("cache", "timings", "drafts")}
