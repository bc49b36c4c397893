"""How many tokens a prompt has, without an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import RequestError
from .asking import named
from .parts import Asked
from .pipeline.reasoning import template_kwargs

if TYPE_CHECKING:
    from ..decode.engine import Engine


def counted(engine: Engine, asked: Asked) -> int:
    """Tokens of the prompt, also where the context has no room for it. Any thread. Raises RequestError, which names the
    field as the caller's API does."""
    kwargs = template_kwargs(asked.reasoning) | asked.request.template_kwargs
    request = replace(asked.request, template_kwargs=kwargs, grammar=None)  # what an answer must match is no token
    try:
        return engine.prepare(request, fits=False).prompt_tokens
    except RequestError as error:
        raise named(error, asked) from None
