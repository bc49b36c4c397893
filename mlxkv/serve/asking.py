"""From what was asked to what an engine is asked: template arguments, the grammar of calls and formats, and all checks
that need the model but not its turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..decode.preparing import Prepared
from ..decode.request import Request
from ..decode.thinking import stand
from ..errors import EngineClosed, RequestError
from .parts import Asked
from .pipeline import Pipeline
from .pipeline.grammars import at_fault, grammar_for
from .pipeline.reasoning import template_kwargs

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from .server import Server


def prepared(engine: Engine, asked: Asked, name: str = "") -> Request:
    """The request for ``engine``, rendered, tokenised and its grammar compiled. name: what status calls it. Any thread;
    may take a while. Raises RequestError, whose ``param`` is the caller's name for the field; EngineClosed where the
    engine cannot answer."""
    if asked.request.prepared is not None:
        return replace(asked.request, name=name)
    if (reason := engine.health().reason) is not None:
        raise EngineClosed(f"The engine takes no requests: {reason}.", "Try again later.")
    grammar = asked.request.grammar
    try:
        grammar = grammar_for(asked.tools, grammar, engine.tokenizer)
        request = replace(
            asked.request,
            template_kwargs=_template_kwargs(asked),
            reasoning_budget=asked.reasoning.budget,
            grammar=grammar,
            share=asked.n > 1,
            name=name,
        )
        made = engine.prepare(request)
        if _ignored(asked, made):
            request = replace(request, reasoning_budget=0)
        return replace(request, prepared=made)
    except RequestError as error:
        if error.param == "grammar" and asked.tools is not None and grammar is not asked.request.grammar:
            error = at_fault(asked.tools, asked.request.grammar, error)
        raise _named(error, asked) from None


def counted(engine: Engine, asked: Asked) -> int:
    """Tokens of the prompt, also where the context has no room for it. Any thread. Raises RequestError as ``prepared``
    does."""
    # what an answer must match is no token
    request = replace(asked.request, template_kwargs=_template_kwargs(asked), grammar=None)
    try:
        return engine.prepare(request, fits=False).prompt_tokens
    except RequestError as error:
        raise _named(error, asked) from None


async def count_prompt(server: Server, asked: Asked) -> int:
    """``counted`` by the model that was named."""
    async with server.lease(asked.model) as engine:
        return await asyncio.to_thread(counted, engine, asked)


def _template_kwargs(asked: Asked) -> dict[str, Any]:
    """The caller's arguments for the template, and what the request says of thinking. Raises RequestError where the two
    say different things: one of them would be ignored."""
    told, given = template_kwargs(asked.reasoning), asked.request.template_kwargs
    for name, value in told.items():
        if isinstance(given.get(name), bool) and given[name] is not value:
            where = f"chat_template_kwargs.{name}"
            raise RequestError(
                f"{where} is {str(given[name]).lower()}, but the request switches thinking {'on' if value else 'off'}.",
                "Give one of them.",
                param=where,
            )
    return told | given


def _named(error: RequestError, asked: Asked) -> RequestError:
    """``error``, naming the field as the caller's API does. Of a place in a list that is not the caller's own, the
    field."""
    if error.param is not None:
        field = error.param.partition("[")[0]
        error.param = asked.names.get(error.param) or asked.names.get(field) or error.param
    return error


def _ignored(asked: Asked, made: Prepared) -> bool:
    """Whether thinking was switched off and the template did not write that into the prompt."""
    reasoning = asked.reasoning
    return reasoning.enabled is False and reasoning.budget is None and stand(made.rendered) != "closed"


def pipeline(engine: Engine, request: Request, asked: Asked, choice: int) -> Pipeline:
    """The text pipeline of one choice of a prepared request. Raises RequestError for tools that this model has not."""
    made = request.prepared
    assert made is not None
    return Pipeline(
        engine.tokenizer,
        asked.tools,
        asked.reasoning,
        choice=choice,
        thinking=made.thinking,
        response=asked.request.grammar,
    )
