"""An OpenAI message list, checked and brought into the form that chat templates take."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from .errors import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = {
    "system": {"name"},
    "developer": {"name"},
    "user": {"name"},
    "assistant": {"name", "tool_calls", "reasoning_content", "reasoning", "refusal"},
    "tool": {"tool_call_id", "name"},
}
# Clients send an answer back as they got it, with these fields empty.
_EMPTY_ALLOWED = {
    "refusal",
    "annotations",
    "audio",
    "function_call",
    "tool_calls",
    "name",
    "reasoning_content",
    "reasoning",
}
#: what the types of parts that are no text stand for
_MEDIA = {
    "image_url": "Images are",
    "image": "Images are",
    "input_audio": "Audio is",
    "audio_url": "Audio is",
    "video_url": "Video is",
    "file": "Files are",
}


def normalise(messages: Any, *, token_ids: bool = False) -> list[dict[str, Any]]:
    """Checked copies: text parts joined, ``developer`` as ``system``, tool arguments as objects where they parse.

    What is normalised already passes unchanged. ``token_ids`` says whether an assistant message may carry the ids it
    was sampled as. Raises RequestError whose ``param`` names the place, ``messages[2].content`` for instance.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages is not a list with at least one message.", param="messages")
    return [_message(message, f"messages[{i}]", token_ids) for i, message in enumerate(messages)]


def check_text(value: Any, where: str) -> str:
    """``value`` if it is text that has a UTF-8 form. Raises RequestError."""
    if not isinstance(value, str):
        raise RequestError(f"{where} is not a string.", param=where)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{where} has half of a surrogate pair, which is no text.", param=where) from None
    return value


def _message(message: Any, where: str, token_ids: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{where} is not an object.", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role is {_short(role)}.", f"It must be one of {', '.join(_ROLES)}.", param=f"{where}.role"
        )
    allowed = {"role", "content"} | _KEYS[role] | ({"token_ids"} if token_ids and role == "assistant" else set())
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    for key, value in message.items():
        if (value is None and key in _EMPTY_ALLOWED) or (value == [] and key in ("annotations", "tool_calls")):
            continue
        if key not in allowed:
            raise RequestError(
                f"{where}.{_short(key, quoted=False)} is not supported.",
                f"A {role} message takes {', '.join(sorted(allowed))}.",
                param=f"{where}.{_short(key, quoted=False)}",
            )
        if key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            made[key] = check_text(value, f"{where}.{key}")
    if role == "tool" and "tool_call_id" not in made:
        raise RequestError(f"{where}.tool_call_id is missing.", param=f"{where}.tool_call_id")
    if message.get("tool_calls"):
        made["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    made["content"] = _content(message.get("content"), f"{where}.content", role)
    if message.get("refusal") is not None:  # what the model said instead
        made["content"] += check_text(message["refusal"], f"{where}.refusal")
    if (reasoning := made.pop("reasoning", None)) is not None:  # two names for one thing; templates know the other
        made.setdefault("reasoning_content", reasoning)
    if "token_ids" in message:
        made["token_ids"] = _ids(message["token_ids"], f"{where}.token_ids")
    return made


def _content(content: Any, where: str, role: str) -> str:
    """As one text. An assistant's may be null, and so may a tool's result: it said nothing."""
    if isinstance(content, str):
        return check_text(content, where)
    if content is None and role in ("assistant", "tool"):
        return ""
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts.", param=where)
    return "".join(_part(part, f"{where}[{i}]", role) for i, part in enumerate(content))


def _part(part: Any, place: str, role: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{place} is not an object.", param=place)
    kind = part.get("type")
    said = "refusal" if kind == "refusal" and role == "assistant" else "text"
    if kind != said:
        media = _MEDIA.get(kind) if isinstance(kind, str) else None
        raise RequestError(
            f"{place}.type is {_short(kind)}.",
            f"{media} not supported." if media else "Only text is supported.",
            param=f"{place}.type",
        )
    for key in part:
        if key not in ("type", said, "cache_control"):  # the last says where a cache should keep something: it does
            name = _short(key, quoted=False)
            raise RequestError(f"{place}.{name} is not supported.", param=f"{place}.{name}")
    return check_text(part.get(said), f"{place}.{said}")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} is not a list.", param=where)
    made = []
    for i, call in enumerate(calls):
        place = f"{where}[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise RequestError(f"{place} is not a function call.", param=place)
        for key in {*call, *(f"function.{k}" for k in function)}:
            if key not in ("id", "type", "function", "index", "function.name", "function.arguments"):
                raise RequestError(f"{place}.{_short(key, quoted=False)} is not supported.", param=place)
        name = check_text(function.get("name"), f"{place}.function.name")
        arguments: Any = function.get("arguments")
        if arguments in (None, ""):  # so some clients write a call without any
            arguments = {}
        if not isinstance(arguments, dict):  # templates print an object; a string would be quoted twice
            check_text(arguments, f"{place}.function.arguments")
            with contextlib.suppress(ValueError, RecursionError):
                parsed = json.loads(arguments)
                arguments = parsed if isinstance(parsed, dict) else arguments
        identity = {"id": check_text(call["id"], f"{place}.id")} if call.get("id") is not None else {}
        made.append({**identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    return made


def _ids(value: Any, where: str) -> list[int]:
    good = isinstance(value, list) and all(type(t) is int and 0 <= t < 2**31 for t in value)
    if not good:
        raise RequestError(f"{where} is not a list of token ids.", param=where)
    return value


def _short(value: Any, quoted: bool = True) -> str:
    text = repr(value) if quoted else str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= 80 else text[:77] + "..."
