"""What the bodies of OpenAI routes share: strictness, sampling fields, names for the caller's own books."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from ..decode.request import Grammar, SamplingParams
from ..errors import RequestError
from ..messages import check_text

#: Arguments of the chat template that the engine sets itself.
_TEMPLATE_OWN = ("messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template")
#: stop strings of one request
MAX_STOPS = 16
#: objects and lists in one another
MAX_DEPTH = 100
#: fields that may be very long, and are checked one by one where they are read
_FLAT = ("prompt", "tokens")


class Strict(BaseModel):
    """No field is converted, and none is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """``include_usage``: a last chunk with token counts. ``include_obfuscation``: padding against listeners, which this
    server has not."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Body(Strict):
    """A body whose unknown fields are named in a 400, with what may have been meant."""

    #: fields of the API that this server does not have, with the values that ask for nothing; null always does
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in body.items():
            if name in cls.UNSUPPORTED:
                harmless = cls.UNSUPPORTED[name]
                if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
                    raise RequestError(f"{name} is not supported.", "Leave it out.", param=name)
            elif name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {near[0]}?" if near else "Leave it out."
                shown = name.encode("utf-8", "replace").decode()[:80]
                raise RequestError(f"There is no field {shown!r}.", hint, param=shown)
        check_json({name: value for name, value in body.items() if name not in _FLAT})
        return {name: value for name, value in body.items() if name not in cls.UNSUPPORTED}


class SamplingFields(Body):
    """Fields that a generating route takes; what is left out is taken from the server's settings. ``timeout``: seconds
    that the request may take."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None

    def sampling(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The given fields, and ``more``, over ``defaults``. Raises RequestError naming the field at fault."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        names += ("presence_penalty", "frequency_penalty", "repetition_penalty")
        asked: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.stop is not None:
            stops = [self.stop] if isinstance(self.stop, str) else self.stop
            if len(stops) > MAX_STOPS:
                raise RequestError(f"stop has {len(stops)} strings.", f"Give {MAX_STOPS} at most.", param="stop")
            asked["stop"] = tuple(check_text(stop, "stop") for stop in stops)
        if self.logit_bias is not None:
            asked["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return replace(defaults, **asked, **more)

    def checked_timeout(self) -> float | None:
        """Raises RequestError for a time-out that is no time."""
        if self.timeout is not None and not 0 < self.timeout < 1e7:
            raise RequestError(f"timeout is {self.timeout}.", "It is a number of seconds above 0.", param="timeout")
        return self.timeout

    def salt(self, default: str) -> str:
        """What keeps this request's cache entries apart from others'."""
        return check_text(self.cache_salt or "", "cache_salt") or default

    def labels(self) -> dict[str, str]:
        """The caller's own words for its books."""
        names = ("user", "safety_identifier", "prompt_cache_key")
        return (self.metadata or {}) | {n: v for n in names if (v := getattr(self, n)) is not None}

    def check_stream_options(self) -> None:
        """Raises RequestError for options of a stream that was not asked for."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options was given without stream.", "Set stream to true.", param="stream_options"
            )


def check_json(value: dict[str, Any]) -> None:
    """Raises RequestError for what Python's reader lets through and others do not: numbers that are none, half of a
    surrogate pair, and what is nested so deep that copying it would fail."""
    level: list[tuple[Any, str]] = [(value, "")]
    for _ in range(MAX_DEPTH):
        inner: list[tuple[Any, str]] = []
        for container, where in level:
            named = isinstance(container, dict)
            for key, item in container.items() if named else enumerate(container):
                if isinstance(item, (dict, list)) or not _plain(item) or (named and not _plain(key)):
                    shown = str(key).encode("utf-8", "replace").decode()[:80]
                    place = (f"{where}.{shown}" if where else shown) if named else f"{where}[{key}]"
                    if not isinstance(item, (dict, list)) or (named and not _plain(key)):
                        what = "is no number" if isinstance(item, float) else "has half of a surrogate pair"
                        raise RequestError(f"{place} {what}, which is no JSON.", param=place[:200])
                    inner.append((item, place))
        level = inner
        if not level:
            return
    top = level[0][1].partition(".")[0].partition("[")[0]
    raise RequestError(f"{top} is nested deeper than {MAX_DEPTH} levels.", "Ask for something simpler.", param=top)


def _plain(value: Any) -> bool:
    """Whether a value that is neither an object nor a list has a form in JSON."""
    if isinstance(value, str):
        if value.isascii():
            return True
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return not isinstance(value, float) or math.isfinite(value)


def limit(value: int | None, name: str) -> int | None:
    """A limit of tokens. Raises RequestError for one below 1, or of more than 64 bits."""
    if value is not None and not 1 <= value < 2**63:
        raise RequestError(f"{name} is {value}.", "It must be a whole number, at least 1.", param=name)
    return value


def template_kwargs(
    given: dict[str, Any] | None, effort: str | None = None, known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Arguments for the chat template, with the effort of thinking if one was asked for: as ``known`` spells it, if it
    does. Raises RequestError for those that are the server's own, and for another effort than that."""
    for name in given or {}:
        if name in _TEMPLATE_OWN:
            where = f"chat_template_kwargs.{name}"
            raise RequestError(f"{where} is set by the server.", "Leave it out.", param=where)
    made = dict(given or {})
    if effort is not None:
        told = known.get(effort, effort)
        if made.get("reasoning_effort") not in (None, effort, told):
            where = "chat_template_kwargs.reasoning_effort"
            raise RequestError(f"{where} and the request's effort differ.", "Give one of them.", param=where)
        if effort != "none":
            made["reasoning_effort"] = made.get("reasoning_effort") or told
    return made


def format_grammar(form: dict[str, Any] | None, where: str, inner: str | None) -> Grammar | None:
    """What OpenAI's ``{"type": "text" | "json_object" | "json_schema", ...}`` asks an answer to match. ``inner``: the
    key under which a schema stands with its name; None where both stand beside the type. Raises RequestError."""
    if form is None:
        return None
    kind = form.get("type")
    allowed = {"type"} if kind in ("text", "json_object") else None
    if kind == "json_schema":
        if inner is not None:
            _refuse_others(form, {"type", inner}, where)
            where, form = f"{where}.{inner}", form.get(inner)
            if not isinstance(form, dict):
                raise RequestError(f"{where} is not an object.", param=where)
        allowed = {"type", "name", "schema", "strict", "description"}
    if allowed is None:
        raise RequestError(
            f"{where}.type is {str(kind)[:80]!r}.",
            "It must be one of text, json_object and json_schema.",
            param=f"{where}.type",
        )
    _refuse_others(form, allowed, where)
    if kind != "json_schema":
        return Grammar("json_object") if kind == "json_object" else None
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise RequestError(f"{where}.schema is not an object.", param=f"{where}.schema")
    for name, type in (("name", str), ("description", str), ("strict", bool)):
        if form.get(name) is not None and not isinstance(form[name], type):
            raise RequestError(f"{where}.{name} is not a {type.__name__}.", param=f"{where}.{name}")
    try:
        return Grammar.of({"json_schema": schema})
    except RequestError as error:
        raise RequestError(error.message, error.cure, param=f"{where}.schema") from error


def _refuse_others(form: dict[str, Any], allowed: set[str], where: str) -> None:
    for name, value in form.items():
        if name not in allowed and value is not None:
            shown = str(name).encode("utf-8", "replace").decode()[:80]
            raise RequestError(f"{where}.{shown} is not supported.", "Leave it out.", param=f"{where}.{shown}")


def _token_id(key: str) -> int:
    if key.isascii() and key.isdigit() and len(key) < 20:
        return int(key)
    raise RequestError(f"logit_bias has the key {key[:80]!r}.", "It maps token ids to numbers.", param="logit_bias")
