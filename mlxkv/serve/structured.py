"""What an answer must match: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_*``, as one
grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..decode.request import Grammar
from ..errors import RequestError
from ..messages import check_text
from .fields import SamplingFields, format_grammar

#: choices of one request
MOST = 1000
#: how each kind is spelt in ``structured_outputs``, and alone
_GUIDED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}


class FormFields(SamplingFields):
    """Fields of a generating route that say what an answer must match; one of them may be given."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def grammar(self) -> tuple[Grammar | None, str]:
        """The grammar that is asked for, and the name of the field that does. Raises RequestError."""
        guided = {name: getattr(self, name) for name in _GUIDED.values()}
        return asked_grammar(self.response_format, self.structured_outputs, guided)


def asked_grammar(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None, guided: Mapping[str, Any]
) -> tuple[Grammar | None, str]:
    """The grammar that the one of these fields asks for, and that field's name. ``guided``: the ``guided_*`` fields by
    name. Raises RequestError, also where more than one is given."""
    made: list[tuple[str, Grammar]] = []
    if (grammar := format_grammar(response_format, "response_format", "json_schema")) is not None:
        made.append(("response_format", grammar))
    outputs = structured_outputs or {}
    for kind, value in outputs.items():
        if kind not in (*_GUIDED, "json_object"):
            shown = str(kind).encode("utf-8", "replace").decode()[:80]
            where = f"structured_outputs.{shown}"
            raise RequestError(
                f"{where} is not supported.", "One of json, regex, choice, grammar and json_object is.", param=where
            )
        if value is not None and not (kind == "json_object" and value is False):
            made.append((where := f"structured_outputs.{kind}", _grammar(kind, value, where)))
    made += [
        (name, _grammar(kind, guided[name], name)) for kind, name in _GUIDED.items() if guided.get(name) is not None
    ]
    if len(made) > 1:
        raise RequestError(
            f"{made[0][0]} and {made[1][0]} both say what the answer must match.", "Give one of them.", param=made[1][0]
        )
    return (made[0][1], made[0][0]) if made else (None, "")


def _grammar(kind: str, value: Any, where: str) -> Grammar:
    if kind == "json_object":
        if value is not True:
            raise RequestError(f"{where} is not true or false.", param=where)
        return Grammar("json_object")
    if kind == "json":
        return _schema(value, where)
    if kind == "choice":
        return _choices(value, where)
    text = check_text(value, where)
    if not text:
        raise RequestError(f"{where} is empty.", param=where)
    return Grammar("regex" if kind == "regex" else "lark", text)


def _schema(value: Any, where: str) -> Grammar:
    if isinstance(value, str):  # clients send schemas as text too
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"{where} is no JSON: {e}.", "It is a JSON schema.", param=where) from None
    if not isinstance(value, (dict, bool)):
        raise RequestError(f"{where} is not a JSON schema.", "It must be an object.", param=where)
    try:
        return Grammar.of({"json_schema": value})
    except RequestError as e:
        raise RequestError(e.message, e.cure, param=where) from e


def _choices(value: Any, where: str) -> Grammar:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST:
        raise RequestError(f"{where} is not a list of texts.", f"It has 1 to {MOST} of them.", param=where)
    texts = [check_text(text, f"{where}[{i}]") for i, text in enumerate(value)]
    if "" in texts:
        at = f"{where}[{texts.index('')}]"
        raise RequestError(f"{at} is empty.", "A choice has at least one character.", param=at)
    return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))
