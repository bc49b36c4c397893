"""A last look at what was promised: an answer that breaks its grammar is an error, never a wrong answer in silence.

The text is parsed again from its first byte, whatever tokens it is made of and however they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...decode.grammar import matches
from ...decode.request import Grammar
from ...errors import EngineError, RequestError
from ..parts import Tools
from .schemas import resolved
from .tools import Made


class GrammarViolated(EngineError):
    """The answer is not what its grammar, its schema or its tool_choice asked for. That is mlxkv's failure."""

    code = "grammar_violated"


def held(function: Mapping[str, Any], tools: Tools) -> bool:
    """Whether calls of a function are held to its schema."""
    return tools.choice != "auto" or function.get("strict") is True


def check_calls(calls: Sequence[Made], tools: Tools) -> None:
    """Raises GrammarViolated for calls that are not what ``tools`` asks for: none where one must be made, another than
    the one that was named, arguments that are not what the schema wants."""
    if tools.choice in ("auto", "none") and not calls:
        return
    if not calls:
        raise GrammarViolated("tool_choice asks for a call, and the model made none.", _CURE)
    functions = {tool["function"]["name"]: tool["function"] for tool in tools.functions}
    for call in calls:
        if isinstance(tools.choice, tuple) and call.name != tools.choice[1]:
            raise GrammarViolated(f"tool_choice names {tools.choice[1]!r}; the model called {call.name[:80]!r}.", _CURE)
        function = functions.get(call.name)
        if function is None:
            if tools.choice != "auto":
                raise GrammarViolated(f"The model called {call.name[:80]!r}, which is none of the tools.", _CURE)
        elif held(function, tools) and not _fits(call.arguments, function.get("parameters")):
            raise GrammarViolated(f"The arguments of a call of {call.name} do not match its parameters.", _CURE)


def check_text(text: str, grammar: Grammar) -> None:
    """Raises GrammarViolated for a text that ``grammar`` does not match."""
    try:
        found = matches(grammar, text)
    except RequestError:  # the engine's tokenizer has special tokens that it names; as text they have no form
        return
    if not found:
        raise GrammarViolated(f"The answer does not match its grammar ({grammar.kind}).", _CURE)


_CURE = "Try again; please report it if it happens again."


def _fits(arguments: str, schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return True
    value = _in_order(json.loads(arguments), schema, schema)
    return matches(Grammar.of({"json_schema": dict(schema)}), json.dumps(value, ensure_ascii=False))


def _in_order(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    """``value`` with the keys of objects in the order of their schemas, in which grammars of schemas want them."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_in_order(each, schema.get("items"), root) for each in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    keys = [key for key in properties if key in value] + [key for key in value if key not in properties]
    return {key: _in_order(value[key], properties.get(key), root) for key in keys}
