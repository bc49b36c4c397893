"""A model's chat template: what form of messages it takes, and what it leaves out without a word."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError

#: characters of what a template says when it refuses
MAX_REASON = 500
_PROBE = "mlxkv0probe"
#: by tokenizer: its template, and that template's form
_known: weakref.WeakKeyDictionary[Any, tuple[Any, Form]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Form:
    """parts: the roles whose content the template takes as a list of text parts only. unseen: the roles that it does
    not write. json_arguments: it takes the arguments of calls as JSON text, not as an object."""

    parts: frozenset[str] = frozenset()
    unseen: frozenset[str] = frozenset()
    json_arguments: bool = False


class Template:
    """The template of ``tokenizer`` with a request's tools and arguments. Any thread."""

    def __init__(
        self, tokenizer: Any, tools: list[dict[str, Any]] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Raises RequestError for a model without a chat template."""
        if getattr(tokenizer, "chat_template", None) is None and not getattr(tokenizer, "has_chat_template", False):
            raise RequestError(
                "This model has no chat template, so messages cannot be rendered.",
                "Send a raw prompt (--raw on the command line), or use an instruct model.",
                param="messages",
            )
        self._tokenizer, self._tools, self._kwargs = tokenizer, tools, dict(kwargs or {})
        own = getattr(tokenizer, "chat_template", None)
        known = _known.get(tokenizer)
        if known is None or known[0] != own:
            known = _known[tokenizer] = (own, _form(tokenizer))
        self._form = known[1]

    def render(self, messages: list[dict[str, Any]], generate: bool) -> str:
        """Text of normalised messages; ``generate``: the model's answer begins behind it. Raises whatever the template
        raises."""
        return _apply(self._tokenizer, [_shaped(m, self._form) for m in messages], generate, self._tools, self._kwargs)

    def check(self, messages: list[dict[str, Any]], whole: str) -> None:
        """Raises RequestError where the template leaves out, without a word, what the model must know of: a system
        message that is not the first, a tool's result, the name of a function that was called, the tools.

        Asked of the template itself, with marks in their place: what it does with a text is its own affair.
        """
        stem = "mark"
        while stem in whole:
            stem += "x"
        marks: dict[str, tuple[str, str]] = {}  # what stands for it -> the field, what it is
        marked: list[dict[str, Any]] = []
        for i, message in enumerate(messages):
            role, made = message["role"], dict(message)
            late = role == "system" and i > 0
            if message["content"] and (late or role == "tool" or role in self._form.unseen) and role != "assistant":
                made["content"] = f"{stem}{i}z"
                said = "a system message that is not the first" if late else f"messages of the role {role}"
                marks[made["content"]] = (f"messages[{i}]", said)
            if calls := message.get("tool_calls"):
                names = [f"{stem}{i}z{j}z" for j in range(len(calls))]
                made["tool_calls"] = [
                    {**call, "function": {**call["function"], "name": name}}
                    for call, name in zip(calls, names, strict=True)
                ]
                marks |= {n: (f"messages[{i}].tool_calls", "calls of tools") for n in names}
            marked.append(made)
        tools = self._tools
        if tools and all(isinstance(tool.get("function"), Mapping) for tool in tools):
            tools = [{**tool, "function": {**tool["function"], "name": f"{stem}t{j}z"}} for j, tool in enumerate(tools)]
            marks |= {tool["function"]["name"]: ("tools", "tools") for tool in tools}
        if not marks:
            return
        try:
            text = _apply(self._tokenizer, [_shaped(m, self._form) for m in marked], False, tools, self._kwargs)
        except Exception:  # it looks at what stands there; then it is not known
            return
        for mark, (where, what) in marks.items():
            if mark not in text:
                raise RequestError(
                    f"This model's chat template does not write {what}.",
                    "The model would not see it. Send it in another form, or use another model.",
                    param=where,
                )


def refusal(error: Exception) -> RequestError:
    """What a template raised, as a refusal of the messages."""
    said = str(error) or type(error).__name__
    said = said if len(said) <= MAX_REASON else said[:MAX_REASON] + " …"
    return RequestError(f"The model's chat template refuses these messages: {said}", param="messages")


def _apply(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    generate: bool,
    tools: list[dict[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=generate, **(kwargs or {})
    )


def _shaped(message: dict[str, Any], form: Form) -> dict[str, Any]:
    """A message as the template takes it."""
    made = message
    if message["role"] in form.parts:
        made = {**made, "content": [{"type": "text", "text": message["content"]}]}
    if form.json_arguments and message.get("tool_calls"):
        made = {**made, "tool_calls": [_written(call) for call in message["tool_calls"]]}
    return made


def _written(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        return call
    text = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _form(tokenizer: Any) -> Form:
    """Found by trying: a template that goes through content part by part writes nothing of a string, and says nothing
    either; one that takes arguments as text raises for an object, or writes it in Python's way."""
    hello = {"role": "user", "content": "hello"}
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {_PROBE: "one"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call00000", "name": "look"}

    def text(messages: list[dict[str, Any]], form: Form) -> str:
        try:
            return _apply(tokenizer, [_shaped(m, form) for m in messages], False)
        except Exception:
            return ""

    parts: set[str] = set()
    unseen: set[str] = set()
    json_arguments = False
    for role, before in (("user", []), ("assistant", [hello]), ("system", []), ("tool", [hello, calling])):
        if role == "tool":
            shown = text([hello, calling], Form(frozenset(parts)))
            if _PROBE not in shown or f"'{_PROBE}'" in shown:
                shown = text([hello, calling], Form(frozenset(parts), json_arguments=True))
                json_arguments = f'"{_PROBE}": "one"' in shown and f'\\"{_PROBE}' not in shown
        message = {**(result if role == "tool" else {"role": role}), "content": _PROBE + role}
        conversation = [*before, message] + ([hello] if role == "system" else [])
        found = Form(frozenset(parts), json_arguments=json_arguments)
        if message["content"] in text(conversation, found):
            continue
        if message["content"] in text(conversation, Form(frozenset({*parts, role}), json_arguments=json_arguments)):
            parts.add(role)
        else:
            unseen.add(role)
    return Form(frozenset(parts), frozenset(unseen), json_arguments)
