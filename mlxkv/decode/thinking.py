"""Thinking: the marks that a model puts around its thoughts, and a constraint that bounds them and has a grammar begin
behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .prompt import Rendered

#: where a prompt ends: within a thought, behind one, or where there is none
Stand = Literal["open", "closed", "none"]


@dataclass(frozen=True)
class Marks:
    """The texts that begin and end a thought, and their ids."""

    start: str
    end: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Any) -> Marks | None:
        """As mlx-lm tells them from the vocabulary; None for a model that does not think."""
        start, end = getattr(tokenizer, "think_start", None), getattr(tokenizer, "think_end", None)
        if not start or not end:
            return None
        return Marks(start, end, tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens))

    def stand(self, rendered: Rendered) -> Stand:
        """Where a prompt ends. Marks in the words of the caller's messages are only words; a raw prompt's is open where
        it ends with the mark."""
        if rendered.ids is not None:
            return "open" if rendered.text.rstrip().endswith(self.start) else "none"
        tail = rendered.text[rendered.tail :]
        began, ended = tail.rfind(self.start), tail.rfind(self.end)
        if began > ended:
            return "open"
        return "none" if ended < 0 else "closed"


def stand(rendered: Rendered) -> Stand:
    marks = Marks.of(rendered.tokenizer)
    return "none" if marks is None else marks.stand(rendered)
