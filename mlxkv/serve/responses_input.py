"""The input items of ``/v1/responses`` as the messages that a chat template takes.

What one answer was made of (reasoning, text, calls) comes as items of its own; they become one assistant message again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import RequestError
from ..messages import check_text
from .responses_output import unseal

#: What each type of item may hold. ``id`` and ``status`` say nothing to the model; null never does.
_KEYS = {
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output", "name"},
    "reasoning": {"summary", "content", "encrypted_content"},
    "item_reference": set(),
}
#: types of the parts of a message that are text, and the key it stands under
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PART_EXTRAS = {"annotations", "logprobs", "prompt_cache_breakpoint"}
_ROLES = ("user", "assistant", "system", "developer")

Item = dict[str, Any]


def checked(value: Any, stored: Callable[[str], Item | None]) -> list[Item]:
    """The items of a request's ``input``, a text as one message; references are looked up with ``stored``.

    Raises RequestError whose ``param`` names the place, ``input[2].content`` for instance.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": check_text(value, "input")}]
    if not isinstance(value, list) or not value:
        raise RequestError("input is not a text or a list with at least one item.", param="input")
    return [_item(item, f"input[{i}]", stored) for i, item in enumerate(value)]


def messages(before: Iterable[Item], items: list[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Checked items as messages: those of the conversation ``before``, then a request's own.

    System messages at the very start are joined to ``instructions``, as most templates take one there. Raises
    RequestError where the output of a call answers no call.
    """
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    for where, item in [*(("previous_response_id", i) for i in before), *_placed(items)]:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            made.append({"role": item["role"], "content": _text(item["content"])})
        elif kind == "function_call_output":
            id = item["call_id"]
            if id not in names:
                raise RequestError(
                    f"{where} answers a call {id[:80]!r} that is not there.",
                    "Send the function_call item too, or the previous_response_id of the response that made the call.",
                    param=f"{where}.call_id",
                )
            made.append({"role": "tool", "tool_call_id": id, "name": names[id], "content": _text(item["output"])})
        else:
            if kind == "function_call":
                names[item["call_id"]] = item["name"]
            _answer(made, item)
    return _led(made, instructions)


def _placed(items: list[Item]) -> list[tuple[str, Item]]:
    return [(f"input[{i}]", item) for i, item in enumerate(items)]


def _answer(made: list[dict[str, Any]], item: Item) -> None:
    """Add a piece of an answer to the assistant message that it belongs to, or begin one with it."""
    last = made[-1] if made and made[-1]["role"] == "assistant" else None
    kind = item["type"]
    begun = (
        last is None
        or (kind == "reasoning" and ("content" in last or "tool_calls" in last))
        or (kind == "message" and "content" in last and "tool_calls" not in last)
    )
    if begun or last is None:
        last = dict[str, Any](role="assistant")
        made.append(last)
    if kind == "reasoning":
        text = last.get("reasoning_content", "") + reasoning_text(item)
        if text:
            last["reasoning_content"] = text
    elif kind == "message":
        last["content"] = last.get("content", "") + _text(item["content"])
    else:
        call = {"name": item["name"], "arguments": item["arguments"]}
        last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": call})


def _led(made: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    for message in made:
        if message["role"] == "assistant":
            message.setdefault("content", "")
    at = 0
    while at < len(made) and made[at]["role"] in ("system", "developer"):
        at += 1
    texts = [text for text in [instructions, *(m["content"] for m in made[:at])] if text]
    return ([{"role": "system", "content": "\n\n".join(texts)}] if texts else []) + made[at:]


def reasoning_text(item: Item) -> str:
    """The text of a reasoning item, from the first of content, summary and encrypted_content that has one."""
    for name in ("content", "summary"):
        text = "".join(part["text"] for part in item.get(name) or [])
        if text:
            return text
    return unseal(item.get("encrypted_content") or "") or ""


# checks


def _item(item: Any, where: str, stored: Callable[[str], Item | None]) -> Item:
    if not isinstance(item, dict):
        raise RequestError(f"{where} is not an object.", param=where)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise RequestError(
            f"{where}.type is {_short(kind)}.", f"Supported are {', '.join(_KEYS)}.", param=f"{where}.type"
        )
    made: Item = {"type": kind}
    for name, value in item.items():
        if value is None or name == "type":
            continue
        if name in ("id", "status"):
            made[name] = check_text(value, f"{where}.{name}")
        elif name in _KEYS[kind]:
            made[name] = value
        else:
            shown = _short(name, quoted=False)
            raise RequestError(
                f"{where}.{shown} is not supported.",
                f"An item of type {kind} takes {', '.join(sorted(_KEYS[kind] | {'type', 'id', 'status'}))}.",
                param=f"{where}.{shown}",
            )
    if kind == "item_reference":
        return _referred(made, where, stored)
    return {"message": _message, "reasoning": _reasoning}.get(kind, _call)(made, where)


def _referred(item: Item, where: str, stored: Callable[[str], Item | None]) -> Item:
    id = _required(item, "id", where)
    found = stored(id)
    if found is None:
        raise RequestError(
            f"{where} refers to an item {id[:80]!r} that is not kept here.",
            "Send the item itself; what is kept is bounded and does not outlive the server.",
            param=f"{where}.id",
        )
    return found


def _message(item: Item, where: str) -> Item:
    if item.get("role") not in _ROLES:
        raise RequestError(
            f"{where}.role is {_short(item.get('role'))}.",
            f"It must be one of {', '.join(_ROLES)}.",
            param=f"{where}.role",
        )
    if "phase" in item:
        check_text(item["phase"], f"{where}.phase")
    _content(item.get("content"), f"{where}.content")
    return item


def _call(item: Item, where: str) -> Item:
    for name in _KEYS[item["type"]] - {"output"}:
        if name != "name" or item["type"] == "function_call":
            _required(item, name, where)
        elif name in item:
            check_text(item[name], f"{where}.{name}")
    if item["type"] == "function_call_output":
        _content(item.get("output"), f"{where}.output")
    return item


def _reasoning(item: Item, where: str) -> Item:
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(name, [])
        if not isinstance(parts, list):
            raise RequestError(f"{where}.{name} is not a list.", param=f"{where}.{name}")
        for i, part in enumerate(parts):
            place = f"{where}.{name}[{i}]"
            if not isinstance(part, dict) or part.get("type") != kind or part.keys() - {"type", "text"}:
                raise RequestError(f"{place} is not a part of type {kind}.", param=place)
            check_text(part.get("text"), f"{place}.text")
    if "encrypted_content" in item:
        sealed = check_text(item["encrypted_content"], f"{where}.encrypted_content")
        if unseal(sealed) is None and not reasoning_text(item):
            raise RequestError(
                f"{where}.encrypted_content was not made by this server.",
                "Leave the item out.",
                param=f"{where}.encrypted_content",
            )
    return item


def _content(content: Any, where: str) -> None:
    if isinstance(content, str):
        check_text(content, where)
        return
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts.", param=where)
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(part, dict):
            raise RequestError(f"{place} is not an object.", param=place)
        key = _TEXTS.get(part["type"]) if isinstance(part.get("type"), str) else None
        if key is None:
            raise RequestError(
                f"{place}.type is {_short(part.get('type'))}.", "Only text is supported.", param=f"{place}.type"
            )
        for name, value in part.items():
            if name not in ("type", key, *_PART_EXTRAS) and value is not None:
                shown = _short(name, quoted=False)
                raise RequestError(f"{place}.{shown} is not supported.", param=f"{place}.{shown}")
        check_text(part.get(key), f"{place}.{key}")


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part[_TEXTS[part["type"]]] for part in content)


def _required(item: Item, name: str, where: str) -> str:
    if name not in item:
        raise RequestError(f"{where}.{name} is missing.", param=f"{where}.{name}")
    return check_text(item[name], f"{where}.{name}")


def _short(value: Any, quoted: bool = True) -> str:
    text = repr(value) if quoted else str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= 80 else text[:77] + "..."
