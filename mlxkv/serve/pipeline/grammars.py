"""What an answer must match: calls of tools that were asked for, a format of the response, or one of the two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...decode.grammar import matches
from ...decode.grammar_text import SPACE
from ...decode.request import Grammar
from ...decode.text import plain
from ...errors import RequestError
from ..parts import Tools
from .forms import Form, Unwritten, form, parameters
from .lark import Lark, joined
from .tools import parser_name

#: formats in which all arguments are one JSON object, so that their schemas are compiled with the grammar
_JSON = ("json_tools", "mistral", "kimi_k2", "kimi_k3")


def grammar_for(tools: Tools | None, response: Grammar | None, tokenizer: Any) -> Grammar | None:
    """The grammar that a request's answer is held to, after its thinking; None where any text will do.

    response: what the text of the answer must match. With tools that may be called, the answer is a text that matches
    it, or calls. Functions that say ``strict`` are called as their schemas want it, or not at all. Raises RequestError
    for tools that this model cannot be asked for, or not so: ``param`` is tools, tool_choice or grammar.
    """
    if tools is None or tools.choice == "none" or not tools.functions:
        return response
    parser = parser_name(tokenizer)
    functions = _chosen(tools)
    must = tools.choice != "auto"
    strict = any(function.get("strict") is True for function in functions)
    if not must and not strict and response is None:
        return None
    param = "tool_choice" if must else "grammar" if response is not None else "tools"
    found = form(parser, _template(tokenizer))
    if found is None:
        raise RequestError(
            f"{param} cannot be kept to: how this model writes calls ({parser}) is not known well enough.",
            "Use tool_choice auto, without strict functions and without a format of the response.",
            param=param,
        )
    lark = Lark(tokenizer)
    try:
        calls = _calls(lark, found, tokenizer, functions, tools.parallel)
        for function in functions if parser not in _JSON else ():
            _readable(function, param)
    except (Unwritten, RecursionError) as e:
        reason = e if isinstance(e, Unwritten) else "parameters are nested too deeply"
        raise RequestError(
            f"{param} cannot be kept to: in this model's format of calls ({parser}), {reason}.",
            "Use plain types for the function's parameters, or tool_choice auto without strict functions.",
            param=param,
        ) from e
    if must:
        return Grammar("lark", lark.text(calls))
    if response is not None:
        return Grammar("lark", lark.text(f"{calls} | {_answer(lark, response)}"))
    begins = lark.up_to(tokenizer.tool_call_start)
    return Grammar(
        "lark", lark.text(f"TEXT | {begins} {_calls(lark, found, tokenizer, functions, tools.parallel, True)}")
    )


def at_fault(tools: Tools, response: Grammar | None, error: RequestError) -> RequestError:
    """``error`` of a grammar that ``grammar_for`` made, naming what of them is at fault."""
    for i, tool in enumerate(tools.functions):
        try:
            _readable(tool["function"], f"tools[{i}].function.parameters")
        except RequestError as found:
            return found
    try:
        if response is not None:
            matches(response, "")
    except RequestError as found:
        return found
    return RequestError(error.message, error.cure, param="tools")


def _readable(function: Mapping[str, Any], param: str) -> None:
    """Raises RequestError for parameters that no grammar can be made of."""
    try:
        matches(Grammar.of({"json_schema": dict(parameters(function))}), "")
    except RequestError as e:
        raise RequestError(f"{function['name']} has parameters whose {e.message}", e.cure, param=param) from e


def _calls(
    lark: Lark, how: Form, tokenizer: Any, functions: list[Mapping[str, Any]], parallel: bool, begun: bool = False
) -> str:
    """One call, or several. ``begun``: the first start marker was there already."""
    start, end = lark.literal(tokenizer.tool_call_start), lark.literal(tokenizer.tool_call_end or "")
    one = lark.rule(how.body(lark, functions))
    between = lark.literal(how.between)
    before, after = lark.literal(how.before), lark.literal(how.after)
    if how.within:
        several = f"{one} ({joined(between, one)})*" if parallel else one
        rest = joined(before, several, after, end)
        return rest if begun else joined(start, rest)
    rest = lark.rule(joined(before, one, after, end))
    more = f"({joined(between, start, rest)})*" if parallel else '""'
    return joined(rest, more) if begun else joined(start, rest, more)


def _chosen(tools: Tools) -> list[Mapping[str, Any]]:
    functions = [tool["function"] for tool in tools.functions]
    if isinstance(tools.choice, tuple):
        name = tools.choice[1]
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise RequestError(
                f"tool_choice names {name[:80]!r}, which is none of the tools.", param="tool_choice.function.name"
            )
    return functions


def _answer(lark: Lark, response: Grammar) -> str:
    """A response's grammar as part of another."""
    if response.kind == "json_object":
        return lark.json({"type": "object"}, space=SPACE)
    if response.kind == "json_schema":
        try:
            return lark.json(json.loads(response.text), space=SPACE)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"grammar (json_schema) cannot be read: {e}.", param="grammar") from e
    raise RequestError(
        f"A grammar ({response.kind}) and tools that may be called exclude each other.",
        "Set tool_choice to none or required, or ask for JSON.",
        param="tool_choice",
    )


def _template(tokenizer: Any) -> str:
    found = getattr(plain(tokenizer), "chat_template", None)
    return found if isinstance(found, str) else ""
