"""Where a model's thinking begins: the markers of its tokenizer, and whether a prompt ends inside them."""

from __future__ import annotations

from typing import Any

from ..parts import Reasoning


def markers(tokenizer: Any) -> tuple[str, str] | None:
    """What begins and ends thinking in this model's text; None for a model that does not think."""
    start, end = getattr(tokenizer, "think_start", None), getattr(tokenizer, "think_end", None)
    return (start, end) if start and end else None


def thinking_at_end(tokenizer: Any, rendered: str) -> bool:
    """Whether the answer to ``rendered`` begins inside a thought that the prompt has opened.

    A start that only a message quotes is none: behind it stands the token that ends the message.
    """
    found = markers(tokenizer)
    if found is None:
        return False
    start, end = found
    at = rendered.rfind(start)
    if at < 0:
        return False
    behind = rendered[at + len(start) :]
    if not behind.strip():
        return True
    return end not in behind and not any(token in behind for token in _ends(tokenizer))


def template_kwargs(reasoning: Reasoning) -> dict[str, Any]:
    """What chat templates are told of thinking: the names that are in use for the same switch. Templates do not look at
    names that they do not know."""
    if reasoning.enabled is None:
        return {}
    return {"enable_thinking": reasoning.enabled, "thinking": reasoning.enabled, "reasoning": reasoning.enabled}


def _ends(tokenizer: Any) -> list[str]:
    """The special tokens, as text; chat templates put them between messages."""
    return [token for token in getattr(tokenizer, "all_special_tokens", None) or [] if token]
