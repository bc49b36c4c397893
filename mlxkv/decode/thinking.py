"""Thinking: the marks that a model puts around its thoughts, and a constraint that bounds them and has a grammar begin
behind them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..errors import DeadEnd
from .constraint import AHEAD, Constraint, allows, pack
from .prompt import Rendered
from .request import Request
from .text import decode

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
            text = rendered.text or decode(rendered.tokenizer, rendered.ids[-16:])
            return "open" if text.rstrip().endswith(self.start) else "none"
        tail = rendered.text[rendered.tail :]
        began, ended = tail.rfind(self.start), tail.rfind(self.end)
        if began > ended:
            return "open"
        return "none" if ended < 0 else "closed"


def stand(rendered: Rendered) -> Stand:
    marks = Marks.of(rendered.tokenizer)
    return "none" if marks is None else marks.stand(rendered)


def bounded(
    request: Request, rendered: Rendered, grammar: Constraint | None, vocab_size: int, eos: Set[int]
) -> Constraint | None:
    """What limits an answer's tokens, ``grammar`` included, which holds for what comes behind thoughts: behind the one
    that the prompt is in, or one that the answer begins with, where the model thinks by itself. None for nothing."""
    marks, budget = Marks.of(rendered.tokenizer), request.reasoning_budget
    if marks is None:
        return grammar
    where = marks.stand(rendered)
    if grammar is not None and where != "open" and (where == "closed" or not _may_think(request, rendered, marks)):
        return grammar
    if grammar is None and budget is None:
        return None
    return Thoughts(marks, where == "open", budget, grammar, vocab_size, eos)


def _may_think(request: Request, rendered: Rendered, marks: Marks) -> bool:
    """Whether the answer may begin with a thought that the prompt says nothing of: of a model that has the marks in its
    vocabulary, but not in its template, nobody knows that it thinks."""
    if request.messages is None or request.reasoning_budget == 0:
        return False
    if any(request.template_kwargs.get(name) is False for name in ("enable_thinking", "thinking")):
        return False
    template = getattr(rendered.tokenizer, "chat_template", None)
    return not isinstance(template, str) or marks.start in template or marks.end in template


@dataclass(frozen=True)
class _At:
    """stage: within a thought, outside of any (with a grammar: before the answer), in the answer of a grammar. spent:
    tokens of thoughts so far. matched: ids so far of the mark that would end this stage."""

    stage: Literal["in", "out", "answer"]
    spent: int = 0
    matched: int = 0


class Thoughts:
    """A constraint (constraint.Constraint) of an answer that thinks: at most ``budget`` tokens within marks, then the
    end mark is all that may come; outside of thoughts everything may, or what a grammar allows. End tokens do not come
    within a thought that a grammar waits behind."""

    def __init__(
        self,
        marks: Marks,
        thinking: bool,
        budget: int | None,
        grammar: Constraint | None,
        vocab_size: int,
        eos: Set[int],
    ) -> None:
        """thinking: a thought has begun already. ``grammar`` belongs to this from now on."""
        self._marks, self._budget, self._grammar, self._vocab_size = marks, budget, grammar, vocab_size
        self._all = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        ends = pack([t for t in eos if 0 <= t < vocab_size], vocab_size)
        self._on = self._all if grammar is None else self._all & ~ends
        self._at = _At("in" if thinking else "out")
        self._past: list[tuple[_At, bool]] = []  # before each token: where it stood; whether the grammar took it

    @property
    def _spent(self) -> bool:
        return self._budget is not None and self._at.spent >= self._budget

    @property
    def accepting(self) -> bool:
        if self._grammar is None:
            return True
        return self._at.stage != "in" and not self._at.matched and self._grammar.accepting

    @property
    def done(self) -> bool:
        return self._grammar is not None and self._at.stage == "answer" and self._grammar.done

    @property
    def free(self) -> bool:
        within = self._budget is None or self._at.spent + AHEAD <= self._budget
        return self._grammar is None and within

    def mask(self) -> np.ndarray:
        at, marks, grammar = self._at, self._marks, self._grammar
        if at.stage == "in":
            return self._only(marks.end_ids[at.matched]) if self._spent else self._on
        if grammar is None:
            begins = at.matched == len(marks.start_ids) - 1
            return self._all & ~self._only(marks.start_ids[-1]) if begins and self._spent else self._all
        if at.stage == "answer":
            return grammar.mask()
        if at.matched:
            return self._only(marks.start_ids[at.matched])
        return grammar.mask() if self._spent else grammar.mask() | self._only(marks.start_ids[0])

    def _only(self, token: int) -> np.ndarray:
        return pack([token], self._vocab_size)

    def advance(self, token: int) -> None:
        if not allows(self.mask(), token):
            raise DeadEnd(f"Token {token} does not follow where the answer is.")
        before, after, given = self._at, self._next(token), False
        if after.stage == "answer" and before.stage != "in":
            assert self._grammar is not None
            self._grammar.advance(token)
            given = True
        self._past.append((before, given))
        self._at = after

    def _next(self, token: int) -> _At:
        at, marks = self._at, self._marks
        if at.stage == "in":
            matched = _matched(marks.end_ids, at.matched, token)
            if matched == len(marks.end_ids):
                return _At("out" if self._grammar is None else "answer", at.spent)
            return _At("in", at.spent + 1, matched)
        if at.stage == "answer":
            return at
        if self._grammar is not None and token != marks.start_ids[at.matched]:
            return replace(at, stage="answer", matched=0)
        if self._grammar is not None and self._spent:  # its first id is text of the grammar's
            return replace(at, stage="answer", matched=0)
        matched = _matched(marks.start_ids, at.matched, token)
        if matched == len(marks.start_ids):
            return _At("in", at.spent)
        return replace(at, matched=matched)

    def fork(self) -> Thoughts:
        grammar = None if self._grammar is None else self._grammar.fork()
        other = Thoughts(self._marks, False, self._budget, grammar, self._vocab_size, frozenset())
        other._on, other._at, other._past = self._on, self._at, self._past.copy()
        return other

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._past):
            raise ValueError(f"{n} tokens cannot be taken back: there are {len(self._past)}")
        if n == 0:
            return
        gone, self._at = self._past[-n:], self._past[-n][0]
        del self._past[-n:]
        if given := sum(given for _, given in gone):
            assert self._grammar is not None
            self._grammar.rollback(given)


def _matched(mark: tuple[int, ...], matched: int, token: int) -> int:
    """Ids of ``mark`` that the tokens end with, after ``token``, where they ended with ``matched`` of them."""
    said = [*mark[:matched], token]
    return next((n for n in range(min(len(said), len(mark)), 0, -1) if tuple(said[-n:]) == mark[:n]), 0)
