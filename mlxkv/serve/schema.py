"""The body of a chat request: every field is honoured, or refused with a 400 that names it."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from ..decode.request import Request, SamplingParams
from ..errors import RequestError
from ..messages import check_text, normalise
from .parts import Asked
from .server import Server

#: Fields of OpenAI's API that this server does not have, with the values that ask for nothing; null always does.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
#: Names for the caller's own books; they change no answer.
_LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

#: Arguments of the chat template that the engine sets itself.
_TEMPLATE_OWN = ("messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template")


class StreamOptions(BaseModel):
    """``include_usage``: a last chunk with token counts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class ChatRequest(BaseModel):
    """``POST /v1/chat/completions``. What is left out is taken from the server's settings."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    messages: list[dict[str, Any]]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    n: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, harmless in _UNSUPPORTED.items():
            value = body.get(name)
            if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
                raise RequestError(f"{name} is not supported yet.", "Leave it out.", param=name)
        for name in body:
            if name not in cls.model_fields and name not in _UNSUPPORTED:
                near = difflib.get_close_matches(name, cls.model_fields, n=1)
                hint = f"Did you mean {near[0]}?" if near else "Leave it out."
                shown = name.encode("utf-8", "replace").decode()[:80]
                raise RequestError(f"There is no field {shown!r}.", hint, param=shown)
        return {name: value for name, value in body.items() if name not in _UNSUPPORTED}

    def to_asked(self, server: Server) -> Asked:
        """What is asked of ``server``. Raises RequestError."""
        request = self.to_request(server.defaults, server.use_cache, server.cache_salt)
        return Asked(self.model, request, "chat", stream=bool(self.stream))

    def to_request(self, defaults: SamplingParams, use_cache: bool, salt: str = "") -> Request:
        """What the engine is asked for, with ``salt`` where the request names none. Raises RequestError naming the
        field at fault."""
        if self.n not in (None, 1):
            raise RequestError(f"n is {self.n}.", "One answer a request is supported.", param="n")
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options was given without stream.", "Set stream to true.", param="stream_options"
            )
        kwargs = self.chat_template_kwargs or {}
        for name in kwargs:
            if name in _TEMPLATE_OWN:
                where = f"chat_template_kwargs.{name}"
                raise RequestError(f"{where} is set by the server.", "Leave it out.", param=where)
        return Request(
            messages=normalise(self.messages),
            sampling=self._sampling(defaults),
            template_kwargs=kwargs,
            salt=check_text(self.cache_salt or "", "cache_salt") or salt,
            use_cache=use_cache,
        )

    def _sampling(self, defaults: SamplingParams) -> SamplingParams:
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        names += ("presence_penalty", "frequency_penalty", "repetition_penalty")
        asked: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        limits = {n: getattr(self, n) for n in ("max_tokens", "max_completion_tokens") if getattr(self, n) is not None}
        if len(set(limits.values())) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ.", "Give one of them.", param="max_completion_tokens"
            )
        for name, value in limits.items():
            if value < 1:
                raise RequestError(f"{name} is {value}.", "It must be a whole number, at least 1.", param=name)
            asked["max_tokens"] = value
        if self.stop is not None:
            stops = [self.stop] if isinstance(self.stop, str) else self.stop
            asked["stop"] = tuple(check_text(stop, "stop") for stop in stops)
        if self.logit_bias is not None:
            asked["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return replace(defaults, **asked)


def _token_id(key: str) -> int:
    if key.isascii() and key.isdigit() and len(key) < 20:
        return int(key)
    raise RequestError(f"logit_bias has the key {key[:80]!r}.", "It maps token ids to numbers.", param="logit_bias")
