"""What a route asks for, and the parts of an answer: the same for every API that this server speaks.

A route makes an ``Asked`` of its body. What comes back is a stream of parts, which the route prints in its own format,
whole or as server-sent events. A choice's parts come in order; those of several choices may alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..decode.request import Completion, Request, TokenLogprob

#: why a choice ended, in OpenAI's words
Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Reasoning:
    """How thinking is handled. enabled: None as the model's template does by itself. budget: tokens of thinking, after
    which its end is forced; None for any. split: thinking is told apart from the answer's text."""

    enabled: bool | None = None
    budget: int | None = None
    split: bool = True


@dataclass(frozen=True)
class Tools:
    """``functions``: OpenAI's tool objects, each ``{"type": "function", "function": {"name", "description",
    "parameters", "strict"}}``. choice: auto, none, required, or the name of the one function that must be called, as
    ``("name", name)``. parallel: more than one call may be made."""

    functions: tuple[Mapping[str, Any], ...]
    choice: Literal["auto", "none", "required"] | tuple[Literal["name"], str] = "auto"
    parallel: bool = True


@dataclass(frozen=True)
class Asked:
    """One request, checked as far as that goes without a model.

    model: a name of the registry. request: what the engine is asked; of ``n`` choices each gets a copy, with seed + i
    where a seed was given. kind: which API ("chat", "completions", "responses", "messages"), for logs and metrics.
    timeout: seconds until it ends with an error; None for the server's setting. names: what the API calls fields of
    ``request`` for which it has another name, as ``{"grammar": "response_format"}``; errors name those.
    """

    model: str
    request: Request
    kind: str
    n: int = 1
    tools: Tools | None = None
    reasoning: Reasoning = Reasoning()
    stream: bool = False
    timeout: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Begun:
    """A choice left the queue. Counts of prompt tokens, and of those that were restored."""

    choice: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Reading:
    """Prefill of a choice has covered ``done`` of ``total`` prompt tokens."""

    choice: int
    done: int
    total: int


@dataclass(frozen=True)
class Text:
    """Text of the answer; complete characters, nothing of stop strings or markers. ``logprobs``: of the tokens that it
    came with, where they were asked for; it may be empty where a token has no text of its own yet."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Thought:
    """Text of the model's reasoning, told apart from its answer."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """A call of a tool begins: the ``index``-th of this choice, from 0."""

    choice: int
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of a call, as JSON text; joined they are one JSON object."""

    choice: int
    index: int
    text: str


@dataclass(frozen=True)
class Ended:
    """A choice has ended. stop: the stop string that ended it, if one did."""

    choice: int
    finish: Finish
    completion: Completion
    stop: str | None = None


@dataclass(frozen=True)
class Ping:
    """Nothing has come for a while; the client may want to hear that somebody is there."""


Part = Begun | Reading | Text | Thought | Call | Arguments | Ended | Ping
