"""Where the life of a request asks other rooms for something, each in one place."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..decode.request import Delta, FinishReason, Request
from ..errors import PromptTooLong
from .parts import Asked, Part, Reasoning, Text, Tools

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from .answer import Answer
    from .server import Server

log = logging.getLogger("mlxkv.serve")


def prepared(engine: Engine, asked: Asked) -> Request:
    """What the engine is asked, checked as far as that goes without a turn of it. Any thread; may take a while."""
    from ..decode.prompt import build

    tokens = build(asked.request, engine.tokenizer, set(), lambda ids, text: None).tokens
    context = engine.info.context_length
    if context is not None and len(tokens) >= context:
        raise PromptTooLong(
            f"The prompt has {len(tokens)} tokens, the model's context holds {context}.",
            f"Shorten it to at most {context - 1}.",
            param="messages" if asked.request.messages is not None else "prompt",
        )
    return asked.request


class Pipeline:
    """Text as the engine gives it."""

    def __init__(self, tokenizer: Any, rendered: str, tools: Tools | None, reasoning: Reasoning) -> None:
        pass

    def feed(self, delta: Delta) -> list[Part]:
        return [Text(0, delta.text, delta.logprobs, tuple(delta.token_ids))]

    def finish(self, reason: FinishReason) -> list[Part]:
        return []


def pipeline(engine: Engine, request: Request, asked: Asked) -> Pipeline:
    """The text pipeline of one choice."""
    return Pipeline(engine.tokenizer, "", asked.tools, asked.reasoning)


def ping_interval(server: Server) -> float:
    """Seconds of silence after which a stream says that it lives; 0 for never."""
    return getattr(server, "ping_s", 10.0) if ping_style(server) != "off" else 0.0


def ping_style(server: Server) -> str:
    """How a stream says so: comment, chunk or off."""
    return getattr(server, "ping_style", "comment")


def observe(answer: Answer, error: BaseException | None, left: bool) -> None:
    """The request is over: one line of the log, without a word of what was said."""
    said = f"{answer.id} model={answer.asked.model[:200]!a}"
    for completion in answer.completions[:1]:
        usage, cache, timings, drafts = completion.usage, completion.cache, completion.timings, completion.drafts
        drafted = f" drafts={drafts.accepted}/{drafts.drafted}" if drafts.drafted else ""
        missed = f" miss={cache.miss_reason}@{cache.miss_position}" if cache.miss_reason else ""
        said += (
            f" prompt={usage.prompt_tokens} cached={usage.cached_tokens} source={cache.source}{missed} "
            f"generated={usage.completion_tokens} prefill_s={timings.prefill_s:.3f} ttft_s={timings.ttft_s:.3f} "
            f"tok/s={timings.decode_tps:.1f}{drafted} finish={completion.finish_reason}"
        )
    if error is not None:
        said += f" failed: {'the client left' if left else error}"
    log.log(logging.WARNING if error is not None and not left else logging.INFO, said)
