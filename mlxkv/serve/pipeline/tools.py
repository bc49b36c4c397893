"""Calls of tools in a model's text: where they begin and end, and what they say, by mlx-lm's parser for its format."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError
from ..parts import Tools
from .schemas import nullable, plainly

#: names that OpenAI allows for functions, with the dots of some models' own
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
#: formats whose parsers make a call of any text: only names that were declared count
_GUESSING = ("glm47",)
#: formats that write strings, and null, without quotation marks; their parsers take null for a string where one may be
_UNQUOTED = ("glm47", "longcat")
#: formats whose parsers take half a call for a whole one: only their end marker says that it is all there
_LOOSE = ("glm47", "longcat", "minicpm5", "muse_spark")
#: what the parsers' expressions begin to match at, and how often that may be, times the length of the text: they look
#: from each such place to the end, and a model that repeats itself would keep a parser busy for minutes; this is about
#: a second on one core
_COSTLY = {
    "gemma4": ("call:", 3e6),
    "kimi_k3": ("<|open|>", 5e6),
    "muse_spark": ("<atem:", 3e7),
    "function_gemma": ("call:", 1e8),
    "glm47": ("<arg_key>", 1e8),
    "longcat": ("<longcat_arg_key>", 1e8),
    "minimax_m2": ("<invoke name=", 3e8),
}
#: how a call begins whose parser looks for a name anywhere
_BEGINS = {"minicpm5": re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'<>]+)\s*>""")}


@dataclass(frozen=True)
class Made:
    """A call that a model made. arguments: a JSON object as text. id: what the model calls it, or one made here."""

    id: str
    name: str
    arguments: str


class Malformed(Exception):
    """A text between the markers of a call that is none. ``open``: more text might make it one, as an end marker
    inside a JSON string does not end the call."""

    def __init__(self, open: bool = False) -> None:
        super().__init__("no call of a tool")
        self.open = open


class CallFormat:
    """How one model writes calls. ``start`` and ``end`` are its markers; an ``end`` of "" is the end of the answer."""

    def __init__(self, tokenizer: Any, tools: Tools) -> None:
        """Raises RequestError for a model whose calls cannot be read."""
        self.parser = parser_name(tokenizer)
        self.start: str = tokenizer.tool_call_start
        self.end: str = tokenizer.tool_call_end or ""
        self._parse = tokenizer.tool_parser
        self._tools = [_plain(function) for function in tools.functions]
        self._names = {tool["function"]["name"] for tool in self._tools}
        self._nulls = {each["function"]["name"]: _nullable(each["function"]) for each in tools.functions}

    @property
    def ends_itself(self) -> bool:
        """Whether the text of a call tells that it is whole, so that it may end without a marker."""
        return self.parser not in _LOOSE

    def parse(self, text: str) -> list[Made]:
        """The calls in a text between the markers, at least one. Raises Malformed."""
        start, most = _COSTLY.get(self.parser, ("", 0))
        if start and text.count(start) * len(text) > most:
            raise Malformed
        if (begins := _BEGINS.get(self.parser)) is not None and not begins.match(text.lstrip()):
            raise Malformed
        try:
            found: Any = []
            for piece in self._pieces(text.strip()):
                more = self._parse(piece, self._tools)
                found += more if isinstance(more, list) else [more]
            calls = [self._call(each) for each in found]
        except Malformed:
            raise
        except json.JSONDecodeError as e:
            raise Malformed(open=e.msg.startswith("Unterminated string")) from e
        except Exception as e:  # parsers raise what they like
            raise Malformed from e
        if not calls:
            raise Malformed
        return calls

    def _pieces(self, text: str) -> list[str]:
        if self.parser == "qwen3_coder":  # its parser reads one function; what stands in several would be mixed up
            return [piece + "</function>" for piece in re.split(r"</function>\s*(?=<function=|$)", text) if piece]
        return [text]

    def _call(self, found: Any) -> Made:
        if not isinstance(found, Mapping):
            raise Malformed
        name, arguments, given = found.get("name"), found.get("arguments", {}), found.get("id")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Malformed
        if self.parser in _GUESSING and name not in self._names:
            raise Malformed
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise Malformed
        if self.parser in _UNQUOTED:
            nulls = self._nulls.get(name, ())
            arguments = {k: None if v == "null" and k in nulls else v for k, v in arguments.items()}
        return Made(given if isinstance(given, str) and given else self.new_id(), name, _json(arguments))

    def new_id(self) -> str:
        """An id for a call, in a form that the model's template takes."""
        if self.parser == "mistral":  # its templates refuse ids of any other form
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def parser_name(tokenizer: Any) -> str:
    """The name of mlx-lm's parser for this model's calls. Raises RequestError where there is none."""
    parser = getattr(tokenizer, "tool_parser", None)
    if parser is None or not getattr(tokenizer, "tool_call_start", None):
        raise RequestError(
            "tools cannot be used: how this model writes calls of tools is not known.",
            "Leave tools out, or use a model whose chat template has them.",
            param="tools",
        )
    return parser.__module__.rpartition(".")[2]


def _plain(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as mlx-lm's parsers read it: they look for parameters, and for objects in their properties."""
    inner = function["function"]
    schema = inner.get("parameters")
    schema = schema if isinstance(schema, Mapping) else {}
    found = schema.get("properties")
    plain = {name: plainly(value, schema) for name, value in found.items()} if isinstance(found, Mapping) else {}
    properties = {name: value if isinstance(value, Mapping) else {} for name, value in plain.items()}
    parameters = {**schema, "type": "object", "properties": properties}
    return {"type": "function", "function": {"name": inner["name"], "parameters": parameters}}


def _nullable(function: Mapping[str, Any]) -> set[str]:
    """The parameters that may be null."""
    schema = function.get("parameters")
    schema = schema if isinstance(schema, Mapping) else {}
    found = schema.get("properties")
    return {name for name, each in found.items() if nullable(each, schema)} if isinstance(found, Mapping) else set()


def _json(arguments: dict[str, Any]) -> str:
    """Raises ValueError for what JSON cannot say, half of a surrogate pair included."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # both halves may be there: Python's literals write them as two
        text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    return text
