"""How thinking is switched on and off."""

from __future__ import annotations

from typing import Any

from ..parts import Reasoning


def template_kwargs(reasoning: Reasoning) -> dict[str, Any]:
    """What chat templates are told of thinking: the names that are in use for the same switch. Templates do not look at
    names that they do not know."""
    if reasoning.enabled is None:
        return {}
    return {"enable_thinking": reasoning.enabled, "thinking": reasoning.enabled, "reasoning": reasoning.enabled}
