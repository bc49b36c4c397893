"""Tools of a chat request: the functions that may be called, and which of them must be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import RequestError
from ..messages import check_text
from .parts import Tools

#: names of functions: OpenAI's, with the dots and colons that some agents use
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
#: functions of one request
MOST = 512
_CHOICES = 'It must be auto, none, required or {"type": "function", "function": {"name": ...}}.'


def asked_tools(tools: Any, choice: Any, parallel: bool | None) -> Tools | None:
    """The three fields of a body (``tools``, ``tool_choice``, ``parallel_tool_calls``) as one. Raises RequestError
    naming the field at fault."""
    functions = _functions(tools)
    names = [function["function"]["name"] for function in functions]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        functions, choice = _allowed(functions, choice)
    chosen = _choice(choice, names)
    return Tools(tuple(functions), chosen, parallel is not False) if functions else None


def template_tools(tools: Tools | None) -> list[dict[str, Any]] | None:
    """The tools that the template is given: none where none may be called."""
    return [dict(function) for function in tools.functions] if tools is not None and tools.choice != "none" else None


def _functions(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if len(tools) > MOST:
        raise RequestError(f"tools has {len(tools)} functions.", f"Give {MOST} at most.", param="tools")
    made = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    seen: set[str] = set()
    for i, tool in enumerate(made):
        name = tool["function"]["name"]
        if name in seen:
            where = f"tools[{i}].function.name"
            raise RequestError(f"Two tools are called {name[:80]!r}.", "Names differ.", param=where)
        seen.add(name)
    return made


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} is not an object.", param=where)
    if tool.get("type") != "function":
        raise RequestError(
            f"{where}.type is {_short(tool.get('type'))}.",
            "Only functions are supported: this server runs no tools of its own.",
            param=f"{where}.type",
        )
    _only(tool, ("type", "function"), where)
    inner, place = tool.get("function"), f"{where}.function"
    if not isinstance(inner, Mapping):
        raise RequestError(f"{place} is not an object.", param=place)
    _only(inner, ("name", "description", "parameters", "strict"), place)
    name = inner.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{place}.name is {_short(name)}.",
            "It has 1 to 128 letters, digits, underscores, dashes, dots and colons.",
            param=f"{place}.name",
        )
    made: dict[str, Any] = {"name": name}
    for key, kind, said in (("description", str, "a string"), ("parameters", dict, "an object"), ("strict", bool, "")):
        value = inner.get(key)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise RequestError(f"{place}.{key} is not {said or 'true or false'}.", param=f"{place}.{key}")
        made[key] = check_text(value, f"{place}.{key}") if isinstance(value, str) else value
    return {"type": "function", "function": made}


def _allowed(functions: list[dict[str, Any]], choice: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """``{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}``: some of the functions, and how they are
    chosen."""
    where = "tool_choice.allowed_tools"
    _only(choice, ("type", "allowed_tools"), "tool_choice")
    inner = choice.get("allowed_tools")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("tools"), list):
        raise RequestError(f"{where} is not an object with a list of tools.", param=where)
    _only(inner, ("mode", "tools"), where)
    if inner.get("mode") not in ("auto", "required"):
        raise RequestError(
            f"{where}.mode is {_short(inner.get('mode'))}.", "It must be auto or required.", param=f"{where}.mode"
        )
    known = {function["function"]["name"]: function for function in functions}
    chosen = {_named(tool, known, f"{where}.tools[{i}]") for i, tool in enumerate(inner["tools"])}
    if not chosen:
        raise RequestError(f"{where}.tools is empty.", 'For no tools, tool_choice is "none".', param=f"{where}.tools")
    return [function for name, function in known.items() if name in chosen], inner["mode"]


def _choice(choice: Any, names: list[str]) -> Any:
    if choice is None:
        return "auto"
    if isinstance(choice, Mapping):
        return ("name", _named(choice, names, "tool_choice"))
    if choice not in ("auto", "none", "required"):
        raise RequestError(f"tool_choice is {_short(choice)}.", _CHOICES, param="tool_choice")
    if choice == "required" and not names:
        raise RequestError("tool_choice is required, but there are no tools.", param="tool_choice")
    return choice


def _named(choice: Any, names: Any, where: str) -> str:
    inner = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(inner, Mapping) or choice.get("type") != "function" or choice.keys() - {"type", "function"}:
        raise RequestError(f"{where} is {_short(choice)}.", _CHOICES if where == "tool_choice" else "", param=where)
    name = inner.get("name")
    if not isinstance(name, str) or name not in names:
        raise RequestError(
            f"{where} names {_short(name)}, which is no tool of this request.", param=f"{where}.function.name"
        )
    return name


def _only(value: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in value:
        if key not in allowed and value[key] is not None:
            shown = str(key).encode("utf-8", "replace").decode()[:80]
            raise RequestError(f"{where}.{shown} is not supported.", "Leave it out.", param=f"{where}.{shown}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
