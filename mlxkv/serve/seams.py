"""Where the life of a request asks other rooms for something, each in one place."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from ..decode.request import Request
from ..errors import EngineClosed, RequestError
from .parts import Asked
from .pipeline import Pipeline
from .pipeline.reasoning import template_kwargs

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from .server import Server


def lease(server: Server, model: str) -> AbstractAsyncContextManager[Engine]:
    """The engine of ``model``, which stays loaded meanwhile. Raises ModelError."""
    return server.lease(model)


def prepared(engine: Engine, asked: Asked) -> Request:
    """What the engine is asked, checked as far as that goes without a turn of it. Any thread; may take a while. Raises
    RequestError, EngineClosed."""
    if (reason := engine.health().reason) is not None:
        raise EngineClosed(f"The engine takes no requests: {reason}.", "Try again later.")
    request = replace(
        asked.request,
        template_kwargs=template_kwargs(asked.reasoning) | asked.request.template_kwargs,
        reasoning_budget=asked.reasoning.budget,
        share=asked.n > 1,
    )
    try:
        return replace(request, prepared=engine.prepare(request))
    except RequestError as error:
        raise named(error, asked) from error


def counted(engine: Engine, asked: Asked) -> int:
    """Tokens of the prompt, also where the context has no room for it. Any thread. Raises RequestError."""
    kwargs = template_kwargs(asked.reasoning) | asked.request.template_kwargs
    request = replace(asked.request, template_kwargs=kwargs, grammar=None)  # what an answer must match is no token
    try:
        return engine.prepare(request, fits=False).prompt_tokens
    except RequestError as error:
        raise named(error, asked) from error


def named(error: RequestError, asked: Asked) -> RequestError:
    """``error``, naming the field as the caller's API does."""
    if error.param is not None and error.param in asked.names:
        error.param = asked.names[error.param]
    return error


def pipeline(engine: Engine, request: Request, asked: Asked, choice: int) -> Pipeline:
    """The text pipeline of one choice of a prepared request. Raises RequestError for tools that this model has not."""
    made = request.prepared
    assert made is not None
    return Pipeline(engine.tokenizer, made.text, asked.tools, asked.reasoning, choice=choice, thinking=made.thinking)


def ping_interval(server: Server) -> float:
    """Seconds of silence after which a stream says that it lives; 0 for never."""
    return server.limits.ping_s if ping_style(server) != "off" else 0.0


def ping_style(server: Server) -> str:
    """How a stream says so: comment, chunk or off."""
    return server.limits.ping
