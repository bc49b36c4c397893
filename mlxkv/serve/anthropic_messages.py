"""Anthropic's system prompt and messages as an OpenAI message list, which is what chat templates take."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import RequestError
from ..messages import check_text

#: An agent's note to the company that bills it, put before the system prompt. It is not meant for the model, and as it
#: differs from request to request, no prompt that begins with it could be found again.
BILLING_NOTE = "x-anthropic-billing-header:"

_SIGNATURE = "mlxkv-"
_SEALED = "mlxkv-sealed-"

_ROLES = ("user", "assistant", "system")
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text",),
}
_KEYS = {
    "text": {"text", "citations"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
}


class CacheControl(BaseModel):
    """A mark that says where a prompt may be remembered. Every prompt is remembered here, with or without one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def signature(thinking: str, sealed: bool = False) -> str:
    """What goes with thinking: a digest of it, or, ``sealed``, the thinking itself for a client that is not shown it
    and sends it back."""
    data = thinking.encode()
    if sealed:
        return _SEALED + base64.b64encode(data).decode()
    return _SIGNATURE + hashlib.sha256(data).hexdigest()


def conversation(system: Any, messages: Any) -> Conversation:
    """An OpenAI message list of Anthropic's fields ``system`` and ``messages``.

    Messages in a row from the same side become one, as in Anthropic's API; a tool's results become messages of their
    own, in their place. Thinking becomes ``reasoning_content``, which a template shows where it wants it; what another
    server has encrypted is left out. Raises RequestError whose ``param`` names the place.
    """
    made = Conversation()
    if system is not None:
        text = _joined(system, "system", "system")
        if text:
            made.put({"role": "system", "content": text}, "system")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages is not a list with at least one message.", param="messages")
    last = None
    for i, message in enumerate(messages):
        last = made.add(message, f"messages[{i}]")
    if not made.messages:
        raise RequestError("The messages have no text.", "Say something.", param="messages")
    made.continued = last == "assistant" and made.messages[-1]["role"] == "assistant"
    if made.continued and "tool_calls" in made.messages[-1]:
        raise RequestError("The last message calls a tool.", "Send the tool's result after it.", param=made.places[-1])
    return made


@dataclass
class Conversation:
    """messages: OpenAI's list. places: where each was found, as ``messages[0]``. continued: the last is the beginning
    of the answer."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    continued: bool = False
    #: name of the tool by id of its call
    called: dict[str, str] = field(default_factory=dict)

    def put(self, message: dict[str, Any], where: str) -> None:
        """One more of OpenAI's messages."""
        self.messages.append(message)
        self.places.append(where)

    def add(self, message: Any, where: str) -> str:
        """Take in one message; its role."""
        if not isinstance(message, dict):
            raise RequestError(f"{where} is not an object.", param=where)
        role = message.get("role")
        if role not in _ROLES:
            raise RequestError(
                f"{where}.role is {_shown(role)}.", f"It must be one of {', '.join(_ROLES)}.", param=f"{where}.role"
            )
        for key in message:
            if key not in ("role", "content"):
                raise RequestError(f"{where}.{_shown(key, False)} is not supported.", param=where)
        content = message.get("content")
        place = f"{where}.content"
        if isinstance(content, str):
            blocks = [{"type": "text", "text": content}] if check_text(content, place) else []
        elif isinstance(content, list):
            blocks = [_block(b, role, f"{place}[{i}]") for i, b in enumerate(content)]
        else:
            raise RequestError(f"{place} must be a string or a list of blocks.", param=place)
        if role == "assistant":
            self._answer(blocks, where)
        else:
            self._said(role, blocks, where)
        return role

    def _said(self, role: str, blocks: list[dict[str, Any]], message: str) -> None:
        for i, block in enumerate(blocks):
            if block["type"] == "text":
                self._text(role, block["text"], message)
                continue
            where = f"{message}.content[{i}]"
            identity = check_text(block.get("tool_use_id"), f"{where}.tool_use_id")
            if identity not in self.called:
                raise RequestError(
                    f"{where}.tool_use_id is {_shown(identity)}, and no tool_use before it has this id.",
                    param=f"{where}.tool_use_id",
                )
            text = _joined(block.get("content") or "", f"{where}.content", "tool_result")
            if _flag(block.get("is_error"), f"{where}.is_error") and not text.lower().startswith("error"):
                text = f"Error: {text}" if text else "Error"  # a tool message of a template has no other place for it
            result = {"role": "tool", "tool_call_id": identity, "name": self.called[identity], "content": text}
            self.put(result, message)

    def _text(self, role: str, text: str, message: str) -> None:
        before = self.messages[-1] if self.messages else None
        if before is not None and role == "user" and before["role"] == "user":
            before["content"] += f"\n{text}"
        else:
            self.put({"role": role, "content": text}, message)

    def _answer(self, blocks: list[dict[str, Any]], message: str) -> None:
        if not blocks:
            return  # the empty beginning of an answer
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.put({"role": "assistant", "content": ""}, message)
        made = self.messages[-1]
        for i, block in enumerate(blocks):
            where = f"{message}.content[{i}]"
            if block["type"] == "text":
                made["content"] += block["text"]  # it was said in one go: nothing between the pieces
            elif block["type"] == "thinking":
                thinking = check_text(block.get("thinking"), f"{where}.thinking") or _unsealed(block.get("signature"))
                if thinking:
                    made["reasoning_content"] = made.get("reasoning_content", "") + thinking
            elif block["type"] == "tool_use":
                made.setdefault("tool_calls", []).append(self._call(block, where))

    def _call(self, block: dict[str, Any], where: str) -> dict[str, Any]:
        identity, name = (check_text(block.get(key), f"{where}.{key}") for key in ("id", "name"))
        if not isinstance(block.get("input"), dict):
            raise RequestError(f"{where}.input is not an object.", param=f"{where}.input")
        if identity in self.called:
            raise RequestError(f"{where}.id was used before.", "Each call has its own.", param=f"{where}.id")
        self.called[identity] = name
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": block["input"]}}


def _block(block: Any, place: str, where: str) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise RequestError(f"{where} is not an object.", param=where)
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _BLOCKS[place]:
        raise RequestError(
            f"{where}.type is {_shown(kind)}.",
            f"Here it can be {' or '.join(_BLOCKS[place])}; images and documents are not supported.",
            param=f"{where}.type",
        )
    for key, value in block.items():
        if key == "cache_control":
            check_cache_control(value, f"{where}.{key}")
        elif key not in _KEYS[kind] | {"type"} and value is not None:
            raise RequestError(f"{where}.{_shown(key, False)} is not supported.", param=where)
    if block.get("citations"):
        raise RequestError(f"{where}.citations is not supported.", "Send the text alone.", param=f"{where}.citations")
    if block.get("caller") not in (None, {"type": "direct"}):
        raise RequestError(f"{where}.caller is not supported.", "Only direct calls are.", param=f"{where}.caller")
    if kind == "text":
        check_text(block.get("text"), f"{where}.text")
    return block


def _joined(content: Any, where: str, kind: str) -> str:
    """The text of a string or of a list of text blocks, a line each."""
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text blocks.", param=where)
    texts = []
    for i, block in enumerate(content):
        text = _block(block, kind, f"{where}[{i}]")["text"]
        if not (kind == "system" and text.startswith(BILLING_NOTE)):
            texts.append(text)
    return "\n".join(texts)


def check_cache_control(value: Any, where: str) -> None:
    """Raises RequestError for what is no cache mark. A good one changes nothing."""
    if value is None:
        return
    try:
        CacheControl.model_validate(value)
    except ValidationError:
        raise RequestError(
            f"{where} is {_shown(value)}.", 'It must be {"type": "ephemeral"}, with a ttl of 5m or 1h or none.', where
        ) from None


def _unsealed(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""  # not one of ours after all: without its thinking, as from any other server


def _flag(value: Any, where: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{where} is {_shown(value)}.", "It must be true or false.", param=where)
    return bool(value)


def _shown(value: Any, quoted: bool = True) -> str:
    text = repr(value) if quoted else str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= 80 else text[:77] + "..."
