"""Grammars in llguidance's Lark: rules that are made one by one, and the pieces that they are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...decode.text import plain

#: what only tells people something about a schema
_REMARKS = ("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly", "$comment")
#: keywords of a schema whose value names schemas, rather than being one
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: keywords whose value is no schema
_VALUES = ("enum", "const", "required", "type")


class Lark:
    """A grammar for one tokenizer. Expressions are texts; ``rule`` gives one a name, which is an expression too."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(plain(tokenizer), "backend_tokenizer", None)
        added = backend.get_added_tokens_decoder() if backend is not None else {}
        self._added = {token.content: id for id, token in added.items()}
        self._rules: dict[str, str] = {}  # bodies, by name
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) + ")")

    def rule(self, body: str, *, options: str = "") -> str:
        """``options`` as they stand in brackets behind a rule's name."""
        name = f"r{len(self._rules)}"
        self._rules[name] = f"{name}{options}: {body}"
        return name

    def text(self, start: str) -> str:
        """The whole grammar, which begins with ``start``."""
        return "\n".join([f"start: {start}", "TEXT: /(?s:.*)/", *self._rules.values()])

    def literal(self, text: str) -> str:
        """Exactly ``text``. What is a token of its own there is that token: models write their markers so."""
        pieces = self._split.split(text) if self._added else [text]
        made = [f"<[{self._added[p]}]>" if p in self._added else quoted(p) for p in pieces if p]
        return " ".join(made) or '""'

    def up_to(self, end: str, text: str = "TEXT") -> str:
        """Any text, and ``end``, which is not in it. text: what it may be, as a terminal."""
        pieces = self._split.split(end) if self._added else [end]
        first = next(p for p in pieces if p)
        if first in self._added:  # such a token is never part of a text
            return f"{text} {self.literal(end)}"
        rest = end[len(first) :]
        found = self.rule(text, options=f"[suffix={quoted(first)}]")
        return f"{found} {self.literal(rest)}" if rest else found

    def any_of(self, expressions: Sequence[str]) -> str:
        return self.rule(" | ".join(expressions))

    def json(self, schema: Any, root: Mapping[str, Any] | None = None, space: str = " ") -> str:
        """JSON of a schema. root: the schema that has its definitions. space: what may stand between its tokens, as a
        regular expression; in a call one blank is enough, and a model cannot lose itself in white space."""
        made = bare(schema)
        made = dict(made) if isinstance(made, Mapping) else ({} if made is True else {"not": {}})
        for name in ("$defs", "definitions"):
            if root is not None and name in root:
                made.setdefault(name, bare(root)[name])
        return self.rule("%json " + json.dumps({"x-guidance": {"whitespace_pattern": space}, **made}))

    def listed(self, items: Sequence[tuple[str, bool]], separator: str = "") -> str:
        """Expressions in their order, of which those with False may be left out, ``separator`` between them."""
        if not separator:
            return " ".join(f"({item})" if needed else f"({item})?" for item, needed in items) or '""'
        # two rules for each place: one for what may follow something, one for what may stand first
        follows = first = '""'
        for item, needed in reversed(items):
            behind = follows
            one = f"{quoted(separator)} {item}"
            follows = self.rule(f"{one} {behind}" if needed else f"({one})? {behind}")
            first = self.rule(f"{item} {behind}" if needed else f"{item} {behind} | {first}")
        return first


def joined(*expressions: str) -> str:
    """One after the other, the empty ones left out."""
    return " ".join(each for each in expressions if each != '""') or '""'


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def bare(schema: Any) -> Any:
    """A schema without remarks for people: descriptions may be long, and a grammar's length is bounded."""
    if not isinstance(schema, Mapping):
        return [bare(each) for each in schema] if isinstance(schema, list) else schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _REMARKS:
            continue
        if key in _NAMED and isinstance(value, Mapping):
            made[key] = {name: bare(each) for name, each in value.items()}
        else:
            made[key] = value if key in _VALUES else bare(value)
    return made
