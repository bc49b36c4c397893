"""Formats in which models write calls of tools, as grammars: what is written so, mlx-lm's parser reads back.

A format's markers are the parser's own (``tool_call_start``, ``tool_call_end``); what stands between them is as the
models' chat templates write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .lark import Lark, joined, quoted
from .schemas import kinds, plainly, properties, texts

Function = Mapping[str, Any]


class Unwritten(Exception):
    """This format cannot say what a function asks for; the message says what."""


@dataclass(frozen=True)
class Form:
    """body: an expression of one call, of the functions that may be called. within: several calls stand between one
    pair of markers, with ``between`` between them; else each has its own."""

    body: Callable[[Lark, Sequence[Function]], str]
    within: bool = False
    before: str = ""
    after: str = ""
    between: str = ""


def parameters(function: Function) -> Mapping[str, Any]:
    found = function.get("parameters")
    return found if isinstance(found, Mapping) else {"type": "object", "properties": {}}


def closed(function: Function) -> dict[str, Any]:
    """Its parameters as a schema of an object that has nothing else, unless it says so."""
    schema = dict(parameters(function))
    if "$ref" not in schema and not any(name in schema for name in ("anyOf", "oneOf", "allOf", "patternProperties")):
        schema = {"type": "object", "additionalProperties": False, **schema}
    return schema


def _object(function: Function) -> dict[str, Any]:
    """{"name": ..., "arguments": ...} as a schema."""
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": closed(function)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _each(one: Callable[[Lark, Function], str]) -> Callable[[Lark, Sequence[Function]], str]:
    """A call is one of any of the functions."""

    def body(lark: Lark, functions: Sequence[Function]) -> str:
        return lark.any_of([one(lark, function) for function in functions])

    return body


def _named_json(lark: Lark, function: Function) -> str:
    schema = _object(function)
    return lark.json(schema, _definitions(schema["properties"]["arguments"]))


def _definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """The definitions of a schema, taken out of it: references look for them at the root of what it becomes part of."""
    return {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}


def _around_json(before: str, after: str) -> Callable[[Lark, Sequence[Function]], str]:
    """The arguments as JSON between two texts; NAME stands for the function's, N for a number."""

    def one(lark: Lark, function: Function) -> str:
        pieces = before.replace("NAME", function["name"]).split("{N}")
        head = " /[0-9]{1,4}/ ".join(lark.literal(piece) for piece in pieces)
        return f"{head} {lark.json(closed(function))}" + (f" {lark.literal(after)}" if after else "")

    return _each(one)


@dataclass(frozen=True)
class _Keyed:
    """Arguments one by one: ``key`` with the argument's name for KEY, its value, ``close``, ``behind``. raw: strings
    are written as they are, not as JSON. pad: what stands between other values and ``close``."""

    head: str
    key: str
    close: str
    behind: str = ""
    tail: str = ""
    pad: str = ""
    raw: bool = True

    def __call__(self, lark: Lark, function: Function) -> str:
        root = parameters(function)
        items = []
        for name, schema, required in _properties(function):
            value = self._value(lark, plainly(schema, root), root, f"{function['name']}.{name}")
            row = (lark.literal(self.key.replace("KEY", name)), value, lark.literal(self.behind))
            items.append((joined(*row), required))
        head, tail = lark.literal(self.head.replace("NAME", function["name"])), lark.literal(self.tail)
        return joined(head, lark.listed(items), tail)

    def _value(self, lark: Lark, schema: Any, root: Mapping[str, Any], where: str) -> str:
        found, end = kinds(schema, root), lark.literal(self.pad + self.close)
        if self.raw and (not found or "string" in found):
            listed = texts(schema)
            if not listed:
                return lark.up_to(self.close)
            if any(text != text.strip() or "<" in text or text.lower() == "null" for text in listed):
                raise Unwritten(f"{where} has values that cannot be told from other things")
            return f"{lark.any_of([lark.literal(text) for text in listed])} {end}"
        if len(found) > 1 and self.raw:
            raise Unwritten(f"{where} may be of several types")
        return f"{lark.json(schema, root)} {end}"


def _properties(function: Function) -> list[tuple[str, Any, bool]]:
    found = properties(parameters(function), parameters(function))
    if found is None:
        raise Unwritten(f"{function['name']} has parameters that are more than a list of properties")
    for name, _, _ in found:
        if not name.replace("_", "").replace("-", "").isalnum():
            raise Unwritten(f"{function['name']} has a parameter named {name[:80]!r}")
    return found


def _pythonic(lark: Lark, function: Function) -> str:
    root = parameters(function)
    items = []
    for name, schema, required in _properties(function):
        if not name.isidentifier():
            raise Unwritten(f"{function['name']} has a parameter named {name[:80]!r}")
        items.append((f"{quoted(name + '=')} {lark.json(schema, root)}", required))
    if not all(part.isidentifier() for part in function["name"].split(".")):
        raise Unwritten(f"{function['name']} is no name there")
    return f"{quoted(function['name'] + '(')} {lark.listed(items, ', ')} {quoted(')')}"


@dataclass(frozen=True)
class _Braced:
    """Gemma's: call:name{key:value,...}, with marks of its own around strings. nested: values may be objects and lists.
    text: what strings may be."""

    quote: str
    nested: bool
    text: str = "TEXT"

    def __call__(self, lark: Lark, function: Function) -> str:
        return f"{quoted('call:' + function['name'])} {self._object(lark, parameters(function), function)}"

    def _object(self, lark: Lark, schema: Any, function: Function) -> str:
        root = parameters(function)
        found = properties(schema, root)
        if found is None or not all(name.replace("_", "").isalnum() for name, _, _ in found):
            raise Unwritten(f"{function['name']} has parameters that are more than a list of plainly named properties")
        items = [
            (f"{quoted(name + ':')} {self._value(lark, each, root, function)}", needed) for name, each, needed in found
        ]
        return f'"{{" {lark.listed(items, ",")} "}}"'

    def _value(self, lark: Lark, schema: Any, root: Mapping[str, Any], function: Function) -> str:
        schema = plainly(schema, root)
        found = kinds(schema, root)
        kind = next(iter(found)) if len(found) == 1 else None
        if kind == "string":
            if listed := texts(schema):
                return lark.any_of([lark.literal(f"{self.quote}{text}{self.quote}") for text in listed])
            return f"{lark.literal(self.quote)} {lark.up_to(self.quote, self.text)}"
        if kind in ("integer", "number", "boolean"):
            return lark.json({**schema, "type": kind}, root)
        if kind == "object" and self.nested:
            return self._object(lark, schema, function)
        if kind == "array" and self.nested and isinstance(schema.get("items"), Mapping):
            item = self._value(lark, schema["items"], root, function)
            return f'"[" ({item} ("," {item})*)? "]"'
        raise Unwritten(f"{function['name']} has a parameter of a kind that cannot be written")


_ARG_KEYS = _Keyed("NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>", "\n")
_ARG_KEYS_TIGHT = _Keyed("NAME", "<arg_key>KEY</arg_key><arg_value>", "</arg_value>")


def form(parser: str, template: str) -> Form | None:
    """The format that mlx-lm's ``parser`` reads, as a model with this chat template writes it; None if unknown."""
    if parser == "mistral" and "[ARGS]" not in template:
        return Form(_each(_named_json), within=True, before="[", after="]", between=", ")
    if parser in ("glm47", "laguna"):
        tight = "</arg_key><arg_value>" in template
        return Form(_each(_ARG_KEYS_TIGHT if tight else _ARG_KEYS), between="\n")
    return _FORMS.get(parser)


_FORMS = {
    "json_tools": Form(_each(_named_json), before="\n", after="\n", between="\n"),
    "mistral": Form(_around_json("NAME[ARGS]", "")),
    "kimi_k2": Form(
        _around_json("<|tool_call_begin|>functions.NAME:{N}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        within=True,
    ),
    "kimi_k3": Form(
        _around_json(
            '<|open|>call tool="NAME" index="{N}"<|sep|><|open|>json type="object"<|sep|>',
            "<|close|>json<|sep|><|close|>call<|sep|>",
        ),
        within=True,
    ),
    "pythonic": Form(_each(_pythonic), within=True, before="[", after="]", between=", "),
    "qwen3_coder": Form(
        _each(_Keyed("\n<function=NAME>\n", "<parameter=KEY>\n", "</parameter>", "\n", tail="</function>\n", pad="\n")),
        between="\n",
    ),
    "minimax_m2": Form(
        _each(_Keyed('<invoke name="NAME">\n', '<parameter name="KEY">', "</parameter>", "\n", tail="</invoke>\n")),
        within=True,
        before="\n",
    ),
    "minicpm5": Form(_each(_Keyed('"NAME">', '<param name="KEY">', "</param>"))),
    "muse_spark": Form(
        _each(
            _Keyed(
                '<atem:invoke name="NAME">\n',
                '<atem:parameter name="KEY">',
                "</atem:parameter>",
                "\n",
                tail="</atem:invoke>\n",
                raw=False,
            )
        ),
        within=True,
        before="\n",
    ),
    "longcat": Form(
        _each(
            _Keyed(
                "NAME\n",
                "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>",
                "</longcat_arg_value>",
                "\n",
            )
        ),
        between="\n",
    ),
    "gemma4": Form(_each(_Braced('<|"|>', nested=True))),
    # its parser takes any closing brace for the end
    "function_gemma": Form(_each(_Braced("<escape>", nested=False, text="/[^}]*/"))),
}
