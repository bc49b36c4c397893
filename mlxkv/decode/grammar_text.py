"""What a grammar says, in llguidance's form, within bounds.

llguidance's limits leave three ways to cost anything: the states of a regular expression (their number grows with the
square of how many parts of it may be left out), those of ``multipleOf`` (one for each remainder), and the depth of its
compiler's recursion (one call for each rule of a chain). Within these bounds the worst texts that were found compile,
or are refused, in 1.2 s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from ..errors import RequestError
from .request import Grammar

#: bytes of a JSON schema; of a regular expression, or a Lark grammar without the schemas inside it
MAX_SCHEMA, MAX_TEXT = 64 << 10, 16 << 10
#: operators of regular expressions, those of a schema's patterns together
OPERATORS, MAX_OPERATORS = "?*+{|", 1000
#: least common multiple of a schema's ``multipleOf``, in units of their last decimal
MAX_MULTIPLE = 50_000
#: between the tokens of JSON; without an end to it, a model may write spaces for ever
SPACE = r"[ \t\r\n]{1,40}"
_EMBEDDED = "%json"


def written(grammar: Grammar) -> str:
    """Raises RequestError for a grammar that is too large, or whose schema is no JSON."""
    from llguidance import LLMatcher

    text, kind = grammar.text, grammar.kind
    most = {"json_schema": MAX_SCHEMA, "lark": MAX_SCHEMA + MAX_TEXT}.get(kind, MAX_TEXT)
    _bound(kind, "bytes", _bytes(text), most)
    try:
        if kind == "regex":
            _bound(kind, "operators", _operators(text), MAX_OPERATORS)
            return LLMatcher.grammar_from_regex(text)
        if kind == "lark":
            return LLMatcher.grammar_from_lark(_lark(text))
        schema = '{"type": "object"}'
        if kind == "json_schema":
            schema, _, operators, multiple = _schema(text, kind)
            _bound(kind, "operators in patterns", operators, MAX_OPERATORS)
            _bound(kind, "as common multiple of multipleOf", multiple, MAX_MULTIPLE)
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": SPACE})
    except (ValueError, RecursionError) as e:
        raise RequestError(f"grammar ({kind}) cannot be read: {e}.", param="grammar") from e


def _lark(text: str) -> str:
    """``text`` with the schemas inside it looked at and written anew. They and the rest are bounded each for itself."""
    out, rest, end = "", "", 0
    operators = multiples = 0
    while (at := text.find(_EMBEDDED, end)) >= 0:
        start = at + len(_EMBEDDED)
        start += len(text[start:]) - len(text[start:].lstrip())
        schema, length, more, multiple = _schema(text[start:], "lark")
        operators, multiples = operators + more, multiples + multiple
        out += text[end:start] + schema
        rest += text[end:start]
        end = start + length
    rest += text[end:]
    _bound("lark", "bytes", _bytes(rest), MAX_TEXT)
    _bound("lark", "bytes of schemas", _bytes(text) - _bytes(rest), MAX_SCHEMA)
    _bound("lark", "operators", _operators(rest), MAX_OPERATORS)
    _bound("lark", "operators in patterns", operators, MAX_OPERATORS)
    _bound("lark", "as sum of common multiples of multipleOf", multiples, MAX_MULTIPLE)
    return out + text[end:]


def _schema(text: str, kind: str) -> tuple[str, int, int, int]:
    """The JSON schema at the start of ``text`` (all of it, if it is no Lark grammar), every name once; its length, the
    operators in its patterns, the common multiple of its multipleOf. Raises RequestError, ValueError."""
    if kind == "lark":
        schema, length = json.JSONDecoder().raw_decode(text)
    else:
        schema, length = json.loads(text), len(text)
    steps: list[Decimal] = []
    operators = 0
    for name, value in _values(schema):
        if name == "pattern" and isinstance(value, str):
            operators += _operators(value)
        if name == "patternProperties" and isinstance(value, dict):
            operators += sum(map(_operators, value))
        if name == "multipleOf" and isinstance(value, (int, float)) and math.isfinite(value) and value > 0:
            steps.append(Decimal(repr(value)) if not isinstance(value, bool) else Decimal(1))
    multiple = 0
    if steps:
        _bound(kind, "values of multipleOf", len(steps), 100)
        small = min(0, *(int(s.normalize().as_tuple().exponent) for s in steps))
        if small < -20 or max(steps) > 10**20:
            raise RequestError(f"grammar ({kind}) has a multipleOf of too many digits.", param="grammar")
        multiple = math.lcm(*(int(s.scaleb(-small)) for s in steps))
    return json.dumps(schema), length, operators, multiple


def _values(value: Any) -> Iterator[tuple[str | None, Any]]:
    """Every value in a JSON value, each with the name it stands under."""
    waiting: list[tuple[str | None, Any]] = [(None, value)]
    while waiting:
        name, value = waiting.pop()
        yield name, value
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += ((None, each) for each in value)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _operators(text: str) -> int:
    return sum(map(text.count, OPERATORS))


def _bound(kind: str, what: str, found: int, most: int) -> None:
    if found > most:
        raise RequestError(f"grammar ({kind}) is too large: {found:,} {what}, at most {most:,}.", param="grammar")
