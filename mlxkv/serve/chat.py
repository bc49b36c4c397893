"""``POST /v1/chat/completions``, streaming and not."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ..decode.request import Completion, Delta, Event, Finished, Started, Usage
from ..errors import DeviceError, EngineClosed, MlxkvError, ModelError
from .bridge import cancelled_with, events
from .errors import error_of
from .schema import ChatRequest

if TYPE_CHECKING:
    from ..decode.engine import Ticket
    from .server import Server

log = logging.getLogger("mlxkv.serve")

#: seconds of silence after which a stream sends a comment line, so that no client times out during a long prefill
PING = 10.0


@dataclass
class Reply:
    """What all objects of one answer share."""

    model: str
    include_usage: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The ``chat.completion`` object, with mlxkv's own reports under ``mlxkv``."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }
        made = self._head("chat.completion") | {"choices": [choice], "usage": usage_object(completion.usage)}
        return made | {"mlxkv": extension(completion)}

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """A ``chat.completion.chunk`` with one choice."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        made = self._head("chat.completion.chunk") | {"choices": [choice]}
        return made | ({"usage": None} if self.include_usage else {})

    def usage_chunk(self, completion: Completion) -> dict[str, Any]:
        """The last chunk, without a choice."""
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage_object(completion.usage)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


async def complete(server: Server, body: ChatRequest, request: Request) -> Response:
    """Answer a chat request. What can be refused before the first token is refused with a status, also in a stream."""
    if not server.serves(body.model):
        raise ModelError(f"There is no model {body.model[:200]!r} here.", f"This server runs {server.model_name}.")
    wanted = body.to_request(server.defaults, server.use_cache, server.cache_salt)
    ticket = server.engine.submit(wanted)  # the engine's thread renders and tokenises
    reply = Reply(server.model_name, bool(body.stream_options and body.stream_options.include_usage))
    if not body.stream:
        async with cancelled_with(request, ticket):
            return JSONResponse(reply.whole(await _finished(ticket, reply.id)))
    stream = events(ticket, PING)
    async with cancelled_with(request, ticket):
        first = await _first(stream)
    return StreamingResponse(
        _sse(server, reply, stream, first, ticket, request),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _first(stream: AsyncIterator[Event | None]) -> Event:
    """The first event; by then the prompt is known to be valid and it is this request's turn."""
    async for event in stream:
        if event is not None:
            return event
    raise EngineClosed("The server stopped before it began to answer.", "Try again.")


async def _finished(ticket: Ticket, name: str) -> Completion:
    async for event in events(ticket):
        if isinstance(event, Finished):
            log_request(name, event.completion)
            if event.completion.finish_reason == "cancelled":
                break
            return event.completion
    raise EngineClosed("The request was cancelled.", "Try again.")


async def _sse(
    server: Server, reply: Reply, stream: AsyncIterator[Event | None], first: Event, ticket: Ticket, request: Request
) -> AsyncIterator[str]:
    """Role first, then text, one finish_reason, usage if wanted, ``[DONE]``; an error stands in for the rest."""
    completion = None
    try:
        async with cancelled_with(request, ticket):
            yield _data(reply.chunk({"role": "assistant", "content": ""}))
            async for event in _chain(first, stream):
                if event is None:
                    yield ": still reading the prompt\n\n"
                elif isinstance(event, Delta) and event.text:
                    yield _data(reply.chunk({"content": event.text}))
                elif isinstance(event, Finished):
                    completion = event.completion
        if completion is None or completion.finish_reason == "cancelled":
            raise EngineClosed("The request was cancelled.", "Try again.")
        yield _data(reply.chunk({}, completion.finish_reason) | {"mlxkv": extension(completion)})
        if reply.include_usage:
            yield _data(reply.usage_chunk(completion))
    except Exception as error:
        if isinstance(error, MlxkvError):
            log.warning("%s failed: %s", reply.id, error)
        else:
            log.exception("%s failed", reply.id)
        if isinstance(error, DeviceError) and server.on_device_error is not None:
            server.on_device_error(error)
        yield _data(error_of(error))
    finally:
        ticket.cancel()
        if completion is not None:
            log_request(reply.id, completion)
    yield "data: [DONE]\n\n"


async def _chain(first: Event, rest: AsyncIterator[Event | None]) -> AsyncIterator[Event | None]:
    if not isinstance(first, Started):
        yield first
    async for event in rest:
        yield event


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def extension(completion: Completion) -> dict[str, Any]:
    """What mlxkv tells beyond OpenAI's API: ``{"cache": CacheReport, "timings": Timings, "drafts": DraftReport}``."""
    return {name: asdict(getattr(completion, name)) for name in ("cache", "timings", "drafts")}


def log_request(name: str, completion: Completion) -> None:
    """One line a request, without a word of what was said."""
    usage, cache, timings, drafts = completion.usage, completion.cache, completion.timings, completion.drafts
    drafted = f" drafts={drafts.accepted}/{drafts.drafted}" if drafts.drafted else ""
    missed = f" miss={cache.miss_reason}@{cache.miss_position}" if cache.miss_reason else ""
    log.info(
        f"{name} prompt={usage.prompt_tokens} cached={usage.cached_tokens} source={cache.source}{missed} "
        f"generated={usage.completion_tokens} prefill_s={timings.prefill_s:.3f} ttft_s={timings.ttft_s:.3f} "
        f"tok/s={timings.decode_tps:.1f}{drafted} finish={completion.finish_reason}"
    )


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
